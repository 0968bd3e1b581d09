"""Check nmt on one GPU, a part at a time: `python scripts/check_gpu.py PART`. check_gpu.sh runs all parts.

    correct   the GPU computes what the CPU does: model, gradients, loss, cached decoding, searches
    bfloat16  autocast stays close to float32 and learns
    speed     training throughput and MFU against a measured matrix peak
    compiled  the same with torch.compile
    decode    beam search at large batches, and the time of a step for one sentence
    resume    going on from a checkpoint gives the same losses
    train     recipe cmn for a minute or two, to BLEU

Each result is written as soon as it is known, as a line of results.jsonl and as a row of results.md, so a part that is
cut off has lost only what it had not measured. `--device cpu --tiny` runs the same code anywhere in seconds.
"""

import argparse
import copy
import hashlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nmt import checkpoint, loss
from nmt.batching import Numbers, collate, plan_updates
from nmt.config import Config, load
from nmt.dataset import Column, ParallelDataset
from nmt.distributed import World, choose_device
from nmt.loss import label_smoothed_loss
from nmt.model import Transformer
from nmt.plan import training_flops
from nmt.search import Hypothesis, beam_search, greedy_search
from nmt.step import Trainer, TrainingModel, train_step
from nmt.symbols import BOS, EOS

PAPER_VOCAB = 37_000
"""Pieces of the paper's English-German vocabulary."""

SMALL = ("layers=2", "d_model=32", "d_ff=64", "heads=4")
VARIANTS = {
    "paper": (),
    "modern": ("norm=pre", "norm_kind=rms", "activation=swiglu", "position=rope", "kv_heads=2", "decoder_layers=1"),
}


@dataclass(frozen=True)
class Report:
    """Where results go."""

    out: Path
    part: str

    def add(self, what: str, value: float | str, unit: str = "", ok: bool | None = None) -> None:
        """Write down one result; `ok` says whether it is as it must be, None that it is only a measurement."""
        row = {"part": self.part, "what": what, "value": value, "unit": unit, "ok": ok}
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        table = self.out / "results.md"
        head = "" if table.exists() else "| part | what | value | ok |\n| --- | --- | ---: | --- |\n"
        shown = f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e4 else f"{value:,.0f}"
        shown = value if isinstance(value, str) else shown
        line = f"| {self.part} | {what} | {shown} {unit} | {'' if ok is None else 'yes' if ok else '**NO**'} |\n"
        with table.open("a", encoding="utf-8") as stream:
            stream.write(head + line)
        print(line, end="", flush=True)

    def at_most(self, what: str, value: float, bound: float) -> None:
        """Write down a difference, and whether it is within its bound."""
        self.add(f"{what} (at most {bound:g})", float(value), ok=value <= bound)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """A failure inside becomes a result, so that the rest of the part still runs."""
        try:
            yield
        except Exception as error:
            self.add(what, f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}", ok=False)


@dataclass(frozen=True)
class Setting:
    """What every part is given."""

    device: torch.device
    tiny: bool
    seconds: float
    """That the part may take; it begins nothing new after these."""
    begun: float
    data: Path
    out: Path

    @property
    def world(self) -> World:
        return World(0, 1, self.device)

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.begun)

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clock(self, work: Callable[[], object], times: int) -> float:
        """Seconds that `work` takes, the mean of so many times after two unmeasured ones."""
        for _ in range(2):
            work()
        self.wait()
        begun = time.perf_counter()
        for _ in range(times):
            work()
        self.wait()
        return (time.perf_counter() - begun) / times


def recipe(name: str | None, *changes: str, tiny: bool = False) -> Config:
    """A recipe with these settings; its model shrunk if it shall be tiny."""
    return load(name, [*changes, *(f"model.{size}" for size in SMALL if tiny)])


def synthetic(pairs: int, vocab: int, seed: int = 0, mean: int = 25) -> ParallelDataset:
    """Random ids whose lengths are spread as those of sentences are, source and target alike, eos at the end."""
    rng = np.random.default_rng(seed)
    src_lengths = np.clip(rng.gamma(3, mean / 3, pairs), 2, 6 * mean).astype(np.int64)
    tgt_lengths = np.clip(src_lengths * rng.normal(1, 0.15, pairs), 2, 6 * mean).astype(np.int64)

    def column(lengths: Numbers) -> Column:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = rng.integers(EOS + 1, vocab, offsets[-1]).astype(np.int32)
        ids[offsets[1:] - 1] = EOS
        return Column(ids, offsets)

    return ParallelDataset(column(src_lengths), column(tgt_lengths), np.arange(pairs))


def relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The norm of the difference over the norm of what is expected, all tensors together, in float64 on the CPU."""
    pairs = [(a.detach().double().cpu(), b.detach().double().cpu()) for a, b in zip(found, expected, strict=True)]
    size = sum(float(b.square().sum()) for _, b in pairs)
    return float((sum(float((a - b).square().sum()) for a, b in pairs) / size) ** 0.5)


# ── correct ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def correct(report: Report, at: Setting) -> None:
    """Everything that is computed on the GPU against the same code on the CPU, and against plain PyTorch."""
    report.add("torch", torch.__version__)
    if at.device.type == "cuda":
        facts = torch.cuda.get_device_properties(at.device)
        report.add("device", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        for name, variant in VARIANTS.items():
            with report.attempt(f"{name}, {dtype}"):
                config = recipe(None, *(f"model.{v}" for v in (*SMALL, "dropout=0", *variant)))
                _same_as_cpu(report, at, config, 211, dtype, bound, f"{name} small, {str(dtype)[6:]}")
    with report.attempt("loss"):
        _loss_is_cross_entropy(report, at)
    with report.attempt("searches"):
        _searches(report, at)
    with report.attempt("base"):
        config = recipe("base.yaml", "model.dropout=0", tiny=at.tiny)
        _same_as_cpu(report, at, config, 500 if at.tiny else 8000, torch.float32, 1e-4, "base, float32")


def _same_as_cpu(
    report: Report, at: Setting, config: Config, vocab: int, dtype: torch.dtype, bound: float, name: str
) -> None:
    """Loss, hidden states and gradients of one ragged batch on both devices, and cached decoding on this one."""
    torch.manual_seed(1)
    here = TrainingModel(Transformer(config.model, vocab).to(dtype), 0.1)
    there = copy.deepcopy(here).to(at.device)
    batch = collate(*synthetic(8, vocab, mean=8).take(np.arange(8)))
    results = []
    for model, device in ((there, at.device), (here, torch.device("cpu"))):
        moved = batch.to(device)
        hidden = model.model(moved.src, moved.tgt_in)
        total, _ = model(moved.src, moved.tgt_in, moved.tgt_out)
        total.backward()
        real = moved.tgt_out != 0
        results.append(([total], [hidden[real]], [parameter.grad for parameter in model.parameters()]))
    for what, found, expected in zip(("loss", "hidden states", "gradients"), *results, strict=True):
        report.at_most(f"{name}: {what} on {at.device.type} - on cpu", relative(found, expected), bound)
    model, moved = there.model.eval(), batch.to(at.device)
    with torch.no_grad():
        whole = model.logits(model(moved.src, moved.tgt_in))
        decoder = model.decoder(moved.src, 1)
        cached = torch.stack([decoder.step(moved.tgt_in[:, t]) for t in range(moved.tgt_in.shape[1])], 1)
    real = moved.tgt_out != 0
    report.at_most(f"{name}: cached decoding - uncached", relative([cached[real]], [whole[real]]), bound)


def _loss_is_cross_entropy(report: Report, at: Setting) -> None:
    """The loss in chunks against F.cross_entropy over all scores at once, in float64 on the CPU."""
    N, D, V = (70, 16, 300) if at.tiny else (1000, 512, PAPER_VOCAB)
    draw = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, D, generator=draw) for n in (N, V))
    target = torch.randint(4, V, (N,), generator=draw)
    results = []
    for device, dtype in ((at.device, torch.float32), (torch.device("cpu"), torch.float64)):
        h, w = (x.to(device, dtype).requires_grad_() for x in (hidden, weight * D**-0.5))
        if dtype == torch.float32:
            total, _ = label_smoothed_loss(h, w, target.to(device), 0.1)
        else:
            total = F.cross_entropy(h @ w.t(), target, label_smoothing=0.1, reduction="sum")
        total.backward()
        results.append(([total], [h.grad], [w.grad]))
    for what, found, expected in zip(("value", "gradient of states", "gradient of weights"), *results, strict=True):
        report.at_most(f"loss of {N:,} x {V:,}: {what} - F.cross_entropy", relative(found, expected), 1e-5)


def _searches(report: Report, at: Setting) -> None:
    """Greedy and beam search of a model that has learned when sentences end, on both devices."""
    vocab, data = 60, synthetic(400, 60, mean=6)
    config = recipe(None, "optim.schedule=constant", "optim.learning_rate=3e-3", "optim.warmup_steps=10",
                    "optim.batch_tokens=600", "train.device_tokens=300", *(f"model.{v}" for v in SMALL))  # fmt: skip
    trainer = Trainer.build(config, at.world, (vocab, vocab))
    for step, update in enumerate(islice(cycle(_updates(data, config)), 20 if at.tiny else 100), 1):
        train_step(trainer, data, update, step)
    for dtype, least in ((torch.float64, 1.0), (torch.float32, 0.98)):
        there = copy.deepcopy(trainer.model).to(dtype).eval()
        here = copy.deepcopy(there).cpu()
        src = collate(*data.take(np.arange(64))).src
        found = [
            [*_translate(model, src.to(device), beam=1), *_translate(model, src.to(device), beam=4)]
            for model, device in ((there, at.device), (here, torch.device("cpu")))
        ]
        same = [one.tokens == other.tokens for one, other in zip(*found, strict=True)]
        name = f"searches, {str(dtype)[6:]}: equal translations on {at.device.type} and cpu (at least {least:g})"
        report.add(name, sum(same) / len(same), ok=sum(same) >= least * len(same))
    report.add("searches: share of hypotheses that ended", sum(hyp.finished for hyp in found[0]) / len(found[0]))


@torch.no_grad()
def _translate(model: Transformer, src_BS: Tensor, beam: int, limits: list[int] | None = None) -> list[Hypothesis]:
    limits = limits or [int(n) + 10 for n in (src_BS != 0).sum(1)]
    decoder = model.decoder(src_BS, beam)
    if beam == 1:
        return greedy_search(decoder, limits, device=src_BS.device)
    return [best[0] for best in beam_search(decoder, limits, beam=beam, alpha=0.6, device=src_BS.device)]


def _updates(data: ParallelDataset, config: Config) -> list[Numbers]:
    return plan_updates(data.src.lengths, data.tgt.lengths, config.optim.batch_tokens, config.optim.seed, 0)


# ── bfloat16 ────────────────────────────────────────────────────────────────────────────────────────────────────────


def bfloat16(report: Report, at: Setting) -> None:
    """The same weights and batch in both precisions, then a few updates."""
    vocab = 300 if at.tiny else 8000
    changes = ("model.dropout=0", "optim.schedule=constant", "optim.learning_rate=3e-4", "optim.warmup_steps=1",
               "optim.batch_tokens=4000", "train.device_tokens=2048")  # fmt: skip
    data, results = synthetic(300, vocab, mean=8), []
    for precision in ("float32", "bfloat16"):
        config = recipe("base.yaml", *changes, f"optim.precision={precision}", tiny=at.tiny)
        trainer = Trainer.build(config, at.world, (vocab, vocab))
        batch = collate(*data.take(np.arange(100))).to(at.device)
        with trainer.precision():
            total, _ = trainer.parallel(batch.src, batch.tgt_in, batch.tgt_out)
        total.backward()
        results.append(([total], [parameter.grad for parameter in trainer.model.parameters()]))
    (loss32, grads32), (loss16, grads16) = results
    report.at_most("loss in bfloat16 - in float32", relative(loss16, loss32), 1e-2)
    report.at_most("gradients in bfloat16 - in float32", relative(grads16, grads32), 0.1)
    report.add("gradients are finite", "", ok=all(bool(grad.isfinite().all()) for grad in grads16))
    losses = []
    for step in range(1, 11):
        stats = train_step(trainer, data, np.arange(len(data)), step)
        losses.append(float(stats.loss) / stats.tgt_tokens)
    report.add("loss after 10 updates / before", losses[-1] / losses[0], ok=losses[-1] < losses[0])
    kinds = {parameter.dtype for parameter in trainer.model.parameters()}
    report.add("weights stay float32", "", ok=kinds == {torch.float32})


# ── speed ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def speed(report: Report, at: Setting) -> None:
    """The matrix peak, the loss by chunk size, then training as it is by default."""
    peak = _matrix_peak(report, at)
    _loss_chunks(report, at)
    sizes = (300, 600) if at.tiny else (4096, 8192, 32768)
    runs = [(name, size) for name in ("base", "big") for size in sizes] + [("base-modern", sizes[-1])]
    for name, size in runs:
        with report.attempt(f"{name}, device_tokens {size}"):
            _pace(report, at, name, size, peak, compiled=False)
    with report.attempt("profile"):
        _profile(at, "base", sizes[-1])


def compiled(report: Report, at: Setting) -> None:
    """Training with torch.compile, what matters most first: compiling takes a good part of the time."""
    peak = _matrix_peak(report, at)
    largest = 600 if at.tiny else 32768
    for name in ("base",) if at.tiny else ("base", "big"):
        with report.attempt(f"{name}, compiled"):
            _pace(report, at, name, largest, peak, compiled=True)


def _matrix_peak(report: Report, at: Setting) -> float:
    """Operations a second of a large bfloat16 product of random numbers."""
    n = 256 if at.tiny else 8192
    a, b = (torch.randn(n, n, device=at.device, dtype=torch.bfloat16) for _ in range(2))
    peak = 2 * n**3 / at.clock(lambda: a @ b, 3 if at.tiny else 20)
    report.add(f"bfloat16 product of {n} x {n}", peak / 1e12, "TFLOP/s")
    return peak


def _loss_chunks(report: Report, at: Setting) -> None:
    """How long the loss with its gradients takes by rows at a time; the module's own number is measured first."""
    N, D, V = (700, 16, 300) if at.tiny else (16384, 512, PAPER_VOCAB)
    hidden, weight = (torch.randn(n, D, device=at.device, requires_grad=True) for n in (N, V))
    target = torch.randint(4, V, (N,), device=at.device)
    usual = loss.CHUNK

    def work() -> None:
        with torch.autocast(at.device.type, dtype=torch.bfloat16):
            label_smoothed_loss(hidden, weight, target, 0.1)

    try:
        for rows in dict.fromkeys((usual, 256, 1024, 4096, 16384)):
            with report.attempt(f"loss in chunks of {rows}"):
                loss.CHUNK = rows
                report.add(f"loss of {N:,} tokens, chunks of {rows:,}", at.clock(work, 3) * 1e3, "ms")
    finally:
        loss.CHUNK = usual


def _trainer(at: Setting, name: str, device_tokens: int, *, compiled: bool) -> tuple[Trainer, ParallelDataset]:
    """A recipe with the paper's update of 25,000 tokens, or one micro-batch where that is more, in bfloat16."""
    vocab = 300 if at.tiny else PAPER_VOCAB
    config = recipe(
        f"{name}.yaml",
        f"optim.batch_tokens={device_tokens if at.tiny else 25_000}",
        "optim.precision=bfloat16",
        f"train.device_tokens={device_tokens}",
        f"train.compile={str(compiled).lower()}",
        tiny=at.tiny,
    )
    return Trainer.build(config, at.world, (vocab, vocab)), synthetic(200 if at.tiny else 20_000, vocab)


def _pace(report: Report, at: Setting, name: str, device_tokens: int, peak: float, *, compiled: bool) -> None:
    """Real tokens a second and the share of the peak that the model's own operations make."""
    title = f"{name}, device_tokens {device_tokens:,}{', compiled' if compiled else ''}"
    if at.left < 8:
        report.add(title, "left out: no time")
        return
    if at.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(at.device)
    trainer, data = _trainer(at, name, device_tokens, compiled=compiled)
    updates, vocab = _updates(data, trainer.config), len(trainer.model.embedding.weight)
    src, tgt = data.src.lengths, data.tgt.lengths
    warm, begun = (1 if at.tiny else 10 if compiled else 4), time.perf_counter()
    for step, update in enumerate(islice(cycle(updates), warm), 1):
        train_step(trainer, data, update, step)
    at.wait()
    if compiled:
        report.add(f"{title}: first {warm} steps, compiling", time.perf_counter() - begun, "s")
    tokens, flops, steps, waits = 0, 0.0, 0, 0.0
    begun, longest = time.perf_counter(), 0.2 if at.tiny else min(5.0, at.left / 2)
    while time.perf_counter() - begun < longest:
        update = updates[(warm + steps) % len(updates)]
        stats = train_step(trainer, data, update, warm + steps + 1)
        flops += sum(training_flops(trainer.config.model, vocab, s, t) for s, t in zip(src[update], tgt[update], strict=True))
        tokens, steps, waits = tokens + stats.tokens, steps + 1, waits + stats.seconds["data"]
    at.wait()
    seconds = time.perf_counter() - begun
    report.add(f"{title}: source and target tokens", tokens / seconds, "a second")
    report.add(f"{title}: MFU", 100 * flops / seconds / peak, "% of the measured peak")
    report.add(f"{title}: a step of {tokens / steps:,.0f} tokens", 1e3 * seconds / steps, "ms")
    report.add(f"{title}: of that preparing data", 1e3 * waits / steps, "ms")
    if at.device.type == "cuda":
        report.add(f"{title}: peak memory", torch.cuda.max_memory_allocated(at.device) / 2**30, "GiB")


def _profile(at: Setting, name: str, device_tokens: int) -> None:
    """Which kernels three steps spend their time in, as profile.txt."""
    from torch.profiler import ProfilerActivity, profile

    trainer, data = _trainer(at, name, device_tokens, compiled=False)
    updates = _updates(data, trainer.config)
    train_step(trainer, data, updates[0], 1)
    cuda = at.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as seen:
        for step in range(2, 3 if at.tiny else 5):
            train_step(trainer, data, updates[step % len(updates)], step)
        at.wait()
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    text = seen.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80)
    (at.out / "profile.txt").write_text(text, encoding="utf-8")


# ── decode ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode(report: Report, at: Setting) -> None:
    """A base model of random weights; it hardly ever ends by itself, so each translation is as long as its source."""
    vocab = 300 if at.tiny else PAPER_VOCAB
    config = recipe("base.yaml", tiny=at.tiny)
    torch.manual_seed(1)
    model = Transformer(config.model, vocab).to(at.device).eval()
    data = synthetic(2000, vocab, seed=5)
    order = np.argsort(data.src.lengths, kind="stable")
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        for beam in (1, 4):
            row = collate(*data.take(order[[len(order) // 2]])).src.to(at.device)
            steps = 5 if at.tiny else 40
            took = at.clock(lambda row=row, beam=beam, steps=steps: _translate(model, row, beam, [steps]), 3)
            report.add(f"{str(dtype)[6:]}, one sentence, beam {beam}: a step", 1e3 * took / (steps + 1), "ms")
        for size in (8,) if at.tiny else (64, 256, 1024):
            if at.left < 5:
                report.add(f"{str(dtype)[6:]}, {size} sentences", "left out: no time")
                continue
            middle = order[len(order) // 2 - size // 2 :][:size]
            src_BS = collate(*data.take(middle)).src.to(at.device)
            limits = [int(n) for n in data.src.lengths[middle]]
            _translate(model, src_BS[: size // 4], 4, limits[: size // 4])
            at.wait()
            begun = time.perf_counter()
            hyps = _translate(model, src_BS, 4, limits)
            seconds = time.perf_counter() - begun
            name = f"{str(dtype)[6:]}, {size} sentences of {np.mean(limits):.0f} tokens, beam 4"
            report.add(f"{name}: target tokens", sum(len(hyp.tokens) for hyp in hyps) / seconds, "a second")


# ── resume ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def resume(report: Report, at: Setting) -> None:
    """Eight steps at once, twice, and eight with a stop in the middle; then so that every kernel is deterministic."""
    vocab = 300 if at.tiny else 8000
    data = synthetic(400, vocab)
    config = recipe("base.yaml", "optim.batch_tokens=3000", "train.device_tokens=1024", "optim.warmup_steps=4",
                    "optim.lr_factor=0.2", tiny=at.tiny)  # fmt: skip
    updates = list(islice(cycle(_updates(data, config)), 8))

    def straight(trainer: Trainer, steps: range) -> list[float]:
        return [float(train_step(trainer, data, updates[step - 1], step).loss) for step in steps]

    def broken() -> list[float]:
        trainer = Trainer.build(config, at.world, (vocab, vocab))
        losses = straight(trainer, range(1, 5))
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "saved"
            tensors = checkpoint.optimizer_tensors(trainer.optimizer, trainer.model)
            checkpoint.save(saved, trainer.model.state_dict(), {"step": 4}, tensors)
            trainer = Trainer.build(replace(config, optim=replace(config.optim, seed=2)), at.world, (vocab, vocab))
            trainer = replace(trainer, config=config)  # Other weights until they are loaded, the same chance.
            trainer.model.load_state_dict(checkpoint.load(saved)[0])
            checkpoint.restore_optimizer(trainer.optimizer, trainer.model, checkpoint.load_optimizer(saved))
        return losses + straight(trainer, range(5, 9))

    def furthest(one: list[float], other: list[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))

    def whole() -> list[float]:
        return straight(Trainer.build(config, at.world, (vocab, vocab)), range(1, 9))

    expected = whole()
    report.add("losses of two equal trainings, relative difference", furthest(whole(), expected))
    report.at_most("losses after going on, relative difference", furthest(broken(), expected), 1e-4)
    with report.attempt("deterministic kernels"):
        torch.use_deterministic_algorithms(True)
        try:
            report.at_most("the same with deterministic kernels", furthest(broken(), whole()), 0.0)
        finally:
            torch.use_deterministic_algorithms(False)


# ── train ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(report: Report, at: Setting) -> None:
    """Recipe cmn for as many steps as the time allows: training, validation, choice of the final model, BLEU."""
    # Here, since what these import may be missing where only the other parts are wanted.
    from nmt.provenance import TrainPaths
    from nmt.scoring import bleu
    from nmt.text import read_lines
    from nmt.tokenizer import load_tokenizers
    from nmt.training import Progress, train_model, updates
    from nmt.translation import Translator

    config = recipe("cmn.yaml", *(("bpe.vocab_size=340", "train.validate_sentences=3") if at.tiny else ()), tiny=at.tiny)
    found = brought(at.data, config.bpe.vocab_size)
    if found is None:
        report.add("skipped", f"no data in {at.data}: bring what `nmt encode -c cmn.yaml` makes, clean to encode")
        return
    clean, bpe, encode = found
    report.add("data", str(encode))
    src, tgt = config.data.src, config.data.tgt
    with tempfile.TemporaryDirectory() as folder:
        paths = TrainPaths(clean=clean, bpe=bpe, encode=encode, run=Path(folder) / "run")
        tokenizers = load_tokenizers(bpe, src, tgt)
        trainer = Trainer.build(config, at.world, (len(tokenizers[0]), len(tokenizers[1])))
        stream = islice(enumerate(updates(config, paths, tokenizers, Progress()), 1), 6 if at.tiny else 150)
        begun, first = time.perf_counter(), 2 if at.tiny else 20
        for step, (data, update, _) in stream:
            train_step(trainer, data, update, step)
            if step == first:
                at.wait()
                begun = time.perf_counter()
        at.wait()
        each = (time.perf_counter() - begun) / (step - first)
        report.add("a step", 1e3 * each, "ms")
        # A third of the time is for validation, the choice of the final model and the test set.
        steps = 8 if at.tiny else max(100, min(config.optim.max_steps, int(0.67 * at.left / each)))
        config = replace(
            config,
            optim=replace(config.optim, max_steps=steps, warmup_steps=min(config.optim.warmup_steps, steps // 4)),
            train=replace(config.train, validate_every=-(-steps // 4), save_every=max(1, steps // 20)),
        )
        begun = time.perf_counter()
        try:
            train_model(config, paths, at.world)
            report.add(f"{steps:,} steps with validation", time.perf_counter() - begun, "s")
            begun = time.perf_counter()
            hyps = Translator.load(paths.run, device=str(at.device)).translate(read_lines(clean / f"test.{src}"))
            report.add(f"translation of {len(hyps):,} test sentences", time.perf_counter() - begun, "s")
            score = bleu(hyps, [[ref] for ref in read_lines(clean / f"test.{tgt}")], tgt)
            report.add("test BLEU", score.value, score.signature)
        finally:
            if (paths.run / "metrics.jsonl").exists():
                shutil.copyfile(paths.run / "metrics.jsonl", at.out / "train-metrics.jsonl")


def brought(data: Path, vocab: int) -> tuple[Path, Path, Path] | None:
    """The clean, bpe and encode folders in `data` that belong together and have so many pieces, if there are any."""

    def made_of(stage: str, name: str, sha256: str | None) -> Path | None:
        folders = [path for path in sorted(data.glob(f"{stage}*")) if (path / name).is_file()]
        same = (path for path in folders if hashlib.sha256((path / name).read_bytes()).hexdigest() == sha256)
        return next(same, None)

    for encode in sorted(data.glob("encode*")):
        if not (encode / "stamp.json").is_file():
            continue
        reads = json.loads((encode / "stamp.json").read_text(encoding="utf-8"))["reads"]
        sizes = json.loads((encode / "meta.json").read_text(encoding="utf-8"))["vocab_size"]
        clean = made_of("clean", "train.en", reads.get("clean/train.en"))
        bpe = made_of("bpe", "joint.model", reads.get("bpe/joint.model"))
        if clean and bpe and set(sizes) == {vocab}:
            return clean, bpe, encode
    return None


# ── all parts ───────────────────────────────────────────────────────────────────────────────────────────────────────

PARTS = {
    part.__name__: part for part in (correct, bfloat16, speed, compiled, decode, resume, train)
}  # In order of worth, but for `compiled` and `train`, which take longest; check_gpu.sh has the order.


def main(words: Sequence[str] | None = None) -> int:
    """Run one part; 1 if it failed or found something wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest form of everything, to test this script")
    parser.add_argument("--seconds", type=float, default=600, help="that the part may take")
    parser.add_argument("--data", type=Path, default=Path("data/cmn"), help="clean, bpe and encode folders for `train`")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="where results go")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options.out, options.part)
    begun = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        device = choose_device(options.device)
        at = Setting(device, options.tiny, options.seconds, begun, options.data, options.out)
        PARTS[options.part](report, at)
    except SystemExit:
        report.add("cut off", f"after {time.perf_counter() - begun:.0f} s", ok=False)
        raise
    except Exception as error:
        report.add("failed", f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " "), ok=False)
        raise
    report.add("done", time.perf_counter() - begun, "s")
    rows = [json.loads(line) for line in (options.out / "results.jsonl").read_text(encoding="utf-8").split("\n") if line]
    return int(any(row["part"] == options.part and row["ok"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
