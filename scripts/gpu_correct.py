"""Parts of check_gpu.py that say whether what the GPU computes is right."""

import copy
import os
import tempfile
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from gpu_report import SMALL, Report, Setting, recipe, relative, synthetic, translate, updates_of
from nmt.config import Config
from nmt.data.batching import collate
from nmt.model.cached_decoder import CachedDecoder
from nmt.model.loss import label_smoothed_loss
from nmt.model.transformer import Transformer
from nmt.runs import checkpoint
from nmt.special_tokens import PAD
from nmt.training.step import Trainer, TrainingModel, prepare, train_step

VARIANTS = {
    "paper": (),
    "modern": (
        "norm_order=pre",
        "norm_type=rms",
        "activation=swiglu",
        "position=rope",
        "kv_heads=2",
        "decoder_layers=1",
    ),
}


# ── correct ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def correct(report: Report, at: Setting) -> None:
    """Everything that is computed on the GPU against the same code on the CPU, and against plain PyTorch."""
    report.add("torch", str(torch.__version__))
    if at.device.type == "cuda":
        facts = torch.cuda.get_device_properties(at.device)
        report.add("device", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        for name, variant in VARIANTS.items():
            with report.attempt(f"{name}, {dtype}"):
                config = recipe(None, *(f"model.{v}" for v in (*SMALL, "dropout=0", *variant)))
                same_as_cpu(report, at, config, 211, dtype, bound, f"{name} small, {str(dtype)[6:]}")
    with report.attempt("loss"):
        loss_is_cross_entropy(report, at)
    with report.attempt("searches"):
        searches_agree(report, at)
    with report.attempt("base"):
        config = recipe("base.yaml", "model.dropout=0", tiny=at.tiny)
        same_as_cpu(report, at, config, 500 if at.tiny else 8000, torch.float32, 1e-4, "base, float32")


def same_as_cpu(
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
        total, _ = model(moved.src, moved.tgt_in, moved.tgt_out, moved.real)
        total.backward()
        results.append(([total], [hidden[moved.tgt_out != PAD]], [parameter.grad for parameter in model.parameters()]))
    for what, found, expected in zip(("loss", "hidden states", "gradients"), *results, strict=True):
        report.at_most(f"{name}: {what} on {at.device.type} - on cpu", relative(found, expected), bound)
    model, moved = there.model.eval(), batch.to(at.device)
    with torch.no_grad():
        whole = model.logits(model(moved.src, moved.tgt_in))
        decoder = CachedDecoder.of(model, moved.src, 1)
        cached = torch.stack([decoder.step(moved.tgt_in[:, t]) for t in range(moved.tgt_in.shape[1])], 1)
    real = moved.tgt_out != PAD
    report.at_most(f"{name}: cached decoding - uncached", relative([cached[real]], [whole[real]]), bound)


def loss_is_cross_entropy(report: Report, at: Setting) -> None:
    """The loss in chunks against F.cross_entropy over all scores at once, in float64 on the CPU."""
    N, D, V = (70, 16, 300) if at.tiny else (1000, 512, 37_000)
    draw = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(N, D, generator=draw), torch.randn(V, D, generator=draw) * D**-0.5
    target = torch.randint(4, V, (N,), generator=draw)
    results = []
    for device, dtype in ((at.device, torch.float32), (torch.device("cpu"), torch.float64)):
        h, w = (x.detach().to(device, dtype).requires_grad_() for x in (hidden, weight))
        if dtype == torch.float32:
            total, _ = label_smoothed_loss(h, w, target.to(device), 0.1)
        else:
            total = F.cross_entropy(h @ w.t(), target, label_smoothing=0.1, reduction="sum")
        total.backward()
        results.append(([total], [h.grad], [w.grad]))
    for what, found, expected in zip(("value", "gradient of states", "gradient of weights"), *results, strict=True):
        report.at_most(f"loss of {N:,} x {V:,}: {what} - F.cross_entropy", relative(found, expected), 1e-5)


def searches_agree(report: Report, at: Setting) -> None:
    """Greedy and beam search of a model that has learned when sentences end, on both devices."""
    vocab, data = 60, synthetic(400, 60, mean=6)
    config = recipe(None, "optim.schedule=constant", "optim.learning_rate=3e-3", "optim.warmup_steps=10",
                    "train.batch_tokens=600", "runtime.device_tokens=300", *(f"model.{v}" for v in SMALL))  # fmt: skip
    trainer = Trainer.build(config, at.world, (vocab, vocab))
    for step, update in enumerate(islice(cycle(updates_of(data, config)), 20 if at.tiny else 100), 1):
        train_step(trainer, prepare(trainer, data, update), step)
    for dtype, least in ((torch.float64, 1.0), (torch.float32, 0.98)):
        there = copy.deepcopy(trainer.model).to(dtype).eval()
        here = copy.deepcopy(there).cpu()
        src = collate(*data.take(np.arange(64))).src
        found = [
            [hyp for beam in (1, 4) for hyp in translate(model, src.to(device), beam)[0]]
            for model, device in ((there, at.device), (here, torch.device("cpu")))
        ]
        same = [one.tokens == other.tokens for one, other in zip(*found, strict=True)]
        name = f"searches, {str(dtype)[6:]}: equal translations on {at.device.type} and cpu (at least {least:g})"
        report.add(name, sum(same) / len(same), ok=sum(same) >= least * len(same))
    report.add("searches: share of hypotheses that ended", sum(hyp.finished for hyp in found[0]) / len(found[0]))


# ── bfloat16 ────────────────────────────────────────────────────────────────────────────────────────────────────────


def bfloat16(report: Report, at: Setting) -> None:
    """The same weights and batch in both precisions, then a few updates."""
    vocab = 300 if at.tiny else 8000
    changes = ("model.dropout=0", "optim.schedule=constant", "optim.learning_rate=3e-4", "optim.warmup_steps=1",
               "train.batch_tokens=4000", "runtime.device_tokens=2048")  # fmt: skip
    data, results = synthetic(100, vocab, mean=8), []
    for precision in ("float32", "bfloat16"):
        config = recipe("base.yaml", *changes, f"train.precision={precision}", tiny=at.tiny)
        trainer = Trainer.build(config, at.world, (vocab, vocab))
        batch = collate(*data.take(np.arange(len(data)))).to(at.device)
        with trainer.precision():
            total, _ = trainer.parallel(batch.src, batch.tgt_in, batch.tgt_out, batch.real)
        total.backward()
        results.append(([total], [parameter.grad for parameter in trainer.model.parameters()]))
    (loss32, grads32), (loss16, grads16) = results
    report.at_most("loss in bfloat16 - in float32", relative(loss16, loss32), 1e-2)
    report.at_most("gradients in bfloat16 - in float32", relative(grads16, grads32), 0.1)
    report.add("gradients are finite", "", ok=all(bool(grad.isfinite().all()) for grad in grads16))
    losses = []
    for step in range(1, 11):
        stats = train_step(trainer, prepare(trainer, data, np.arange(len(data))), step)
        losses.append(float(stats.loss) / stats.tgt_tokens)
    report.add("loss after 10 updates / before", losses[-1] / losses[0], ok=losses[-1] < losses[0])
    kinds = {parameter.dtype for parameter in trainer.model.parameters()}
    report.add("weights stay float32", "", ok=kinds == {torch.float32})


# ── resume ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def resume(report: Report, at: Setting) -> None:
    """Eight steps at once, twice, and eight with a stop in the middle; then so that every kernel is deterministic."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # Without it cuBLAS refuses to be deterministic.
    vocab, size = (300, 240) if at.tiny else (8000, 3000)
    data = synthetic(size // 8, vocab, mean=8 if at.tiny else 25)
    sizes = (f"train.batch_tokens={size}", f"runtime.device_tokens={size // 3}")
    config = recipe("base.yaml", *sizes, "optim.warmup_steps=4", "optim.lr_factor=0.2", tiny=at.tiny)
    updates = list(islice(cycle(updates_of(data, config)), 8))

    def straight(trainer: Trainer, steps: range) -> list[float]:
        return [float(train_step(trainer, prepare(trainer, data, updates[step - 1]), step).loss) for step in steps]

    def broken() -> tuple[list[float], str]:
        trainer = Trainer.build(config, at.world, (vocab, vocab))
        losses = straight(trainer, range(1, 5))
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "saved"
            tensors = checkpoint.optimizer_tensors(trainer.optimizer, trainer.model)
            checkpoint.save(saved, trainer.model.state_dict(), {"step": 4}, tensors)
            trainer = Trainer.build(replace(config, train=replace(config.train, seed=2)), at.world, (vocab, vocab))
            # Other weights until they are loaded, the same chance.
            train = replace(trainer.config.train, seed=config.train.seed)
            trainer = replace(trainer, config=replace(trainer.config, train=train))
            trainer.model.load_state_dict(checkpoint.load(saved)[0])
            checkpoint.restore_optimizer(trainer.optimizer, trainer.model, checkpoint.load_optimizer(saved))
        return losses + straight(trainer, range(5, 9)), checkpoint.digest(trainer.model.state_dict())

    def furthest(one: list[float], other: list[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))

    def whole() -> tuple[list[float], str]:
        trainer = Trainer.build(config, at.world, (vocab, vocab))
        return straight(trainer, range(1, 9)), checkpoint.digest(trainer.model.state_dict())

    expected, weights = whole()
    again, resumed = whole(), broken()
    twice = furthest(again[0], expected)
    report.add("losses of two equal trainings, relative difference", twice)
    report.at_most("losses after resuming, relative difference", furthest(resumed[0], expected), max(1e-4, 4 * twice))
    report.add("the weights of two equal trainings", "equal" if again[1] == weights else "not equal")
    report.add("the weights after resuming", "equal" if resumed[1] == weights else "not equal")
    with report.attempt("deterministic kernels"):
        torch.use_deterministic_algorithms(True)
        try:
            resumed, again = broken(), whole()
            report.at_most("the losses with deterministic kernels", furthest(resumed[0], again[0]), 0.0)
            report.add("the weights with deterministic kernels, bit for bit", "", ok=resumed[1] == again[1])
        finally:
            torch.use_deterministic_algorithms(False)
