"""Parts of check_gpu.py that say how fast training and decoding are."""

import time
from itertools import cycle, islice

import numpy as np
import torch

from gpu_report import Report, Setting, recipe, synthetic, translate, updates_of
from nmt import loss
from nmt.batching import collate
from nmt.dataset import ParallelDataset
from nmt.loss import label_smoothed_loss
from nmt.model import Transformer
from nmt.sizes import training_flops
from nmt.step import Trainer, prepare, train_step

PAPER_VOCAB = 37_000
"""Pieces of the paper's English-German vocabulary."""

# ── speed ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def speed(report: Report, at: Setting) -> None:
    """The matrix peak, the loss by chunk size, then training as it is by default."""
    peak = matrix_peak(report, at)
    loss_chunks(report, at)
    sizes = (300, 600) if at.tiny else (4096, 8192, 32768)
    runs = [(name, size) for name in ("base", "big") for size in sizes] + [("base-modern", sizes[-1])]
    for name, size in runs:
        with report.attempt(f"{name}, device_tokens {size}"):
            pace(report, at, name, size, peak, compiled=False)
    with report.attempt("profile"):
        profile_steps(at, "base", sizes[-1])


def compiled(report: Report, at: Setting) -> None:
    """Training with torch.compile, what matters most first: compiling takes a good part of the time."""
    peak = matrix_peak(report, at)
    largest = 600 if at.tiny else 32768
    for name in ("base",) if at.tiny else ("base", "big"):
        with report.attempt(f"{name}, compiled"):
            pace(report, at, name, largest, peak, compiled=True)


def matrix_peak(report: Report, at: Setting) -> float:
    """Operations a second of a large bfloat16 product of random numbers."""
    n = 256 if at.tiny else 8192
    a, b = (torch.randn(n, n, device=at.device, dtype=torch.bfloat16) for _ in range(2))
    peak = 2 * n**3 / at.clock(lambda: a @ b, 3 if at.tiny else 20)
    report.add(f"bfloat16 product of {n} x {n}", peak / 1e12, "TFLOP/s")
    return peak


def loss_chunks(report: Report, at: Setting) -> None:
    """How long the loss with its gradients takes by rows at a time; the module's own number is measured first."""
    N, D, V = (700, 16, 300) if at.tiny else (16384, 512, PAPER_VOCAB)
    hidden, weight = (torch.randn(n, D, device=at.device, requires_grad=True) for n in (N, V))
    target = torch.randint(4, V, (N,), device=at.device)
    usual = loss.CHUNK
    kind = at.device.type

    def work() -> None:
        with torch.autocast(at.device.type, dtype=torch.bfloat16):
            label_smoothed_loss(hidden, weight, target, 0.1)

    try:
        for rows in dict.fromkeys((usual[kind], 256, 1024, 4096, 16384)):
            with report.attempt(f"loss in chunks of {rows}"):
                loss.CHUNK = {**usual, kind: rows}
                report.add(f"loss of {N:,} tokens, chunks of {rows:,}", at.clock(work, 3) * 1e3, "ms")
    finally:
        loss.CHUNK = usual


def trainer_of(at: Setting, name: str, device_tokens: int, *, compiled: bool) -> tuple[Trainer, ParallelDataset]:
    """A recipe in bfloat16 with the update of the paper, 25,000 tokens, and data to go with it."""
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


def pace(report: Report, at: Setting, name: str, device_tokens: int, peak: float, *, compiled: bool) -> None:
    """Real tokens a second and the share of the peak that the model's own operations make."""
    title = f"{name}, device_tokens {device_tokens:,}{', compiled' if compiled else ''}"
    if at.left < 8:
        report.add(title, "left out: no time")
        return
    if at.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(at.device)
    trainer, data = trainer_of(at, name, device_tokens, compiled=compiled)
    updates, vocab = updates_of(data, trainer.config), len(trainer.model.embedding.weight)
    src, tgt = (column.lengths.astype(float) for column in (data.src, data.tgt))
    warm, begun = (1 if at.tiny else 10 if compiled else 4), time.perf_counter()
    for step, update in enumerate(islice(cycle(updates), warm), 1):
        train_step(trainer, prepare(trainer, data, update), step)
    at.wait()
    if compiled:
        report.add(f"{title}: first {warm} steps, compiling", time.perf_counter() - begun, "s")
    tokens, flops, steps, waits = 0, 0.0, 0, 0.0
    begun, longest = time.perf_counter(), 0.2 if at.tiny else min(4.0, at.left / 2)
    while time.perf_counter() - begun < longest:
        update = updates[(warm + steps) % len(updates)]
        stats = train_step(trainer, prepare(trainer, data, update), warm + steps + 1)
        flops += float(training_flops(trainer.config.model, vocab, src[update], tgt[update]).sum())
        tokens, steps, waits = tokens + stats.tokens, steps + 1, waits + stats.seconds["data"]
    at.wait()
    seconds = time.perf_counter() - begun
    report.add(f"{title}: source and target tokens", tokens / seconds, "a second")
    report.add(f"{title}: MFU", 100 * flops / seconds / peak, "% of the measured peak")
    report.add(f"{title}: a step of {tokens / steps:,.0f} tokens", 1e3 * seconds / steps, "ms")
    report.add(f"{title}: of that preparing data", 1e3 * waits / steps, "ms")
    if at.device.type == "cuda":
        report.add(f"{title}: peak memory", torch.cuda.max_memory_allocated(at.device) / 2**30, "GiB")


def profile_steps(at: Setting, name: str, device_tokens: int) -> None:
    """Which kernels three steps spend their time in, as profile.txt."""
    from torch.profiler import ProfilerActivity, profile

    trainer, data = trainer_of(at, name, device_tokens, compiled=False)
    updates = updates_of(data, trainer.config)
    train_step(trainer, prepare(trainer, data, updates[0]), 1)
    cuda = at.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as seen:
        for step in range(2, 3 if at.tiny else 5):
            train_step(trainer, prepare(trainer, data, updates[step % len(updates)]), step)
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
            row = collate(*data.take(order[len(order) // 2 :][:1])).src.to(at.device)
            translate(model, row, beam, [5])
            begun = time.perf_counter()
            _, steps = translate(model, row, beam, [5 if at.tiny else 100])
            seconds = time.perf_counter() - begun
            report.add(f"{str(dtype)[6:]}, one sentence, beam {beam}: a step", 1e3 * seconds / steps, "ms")
        for size in (8,) if at.tiny else (64, 256, 1024):
            if at.left < 5:
                report.add(f"{str(dtype)[6:]}, {size} sentences", "left out: no time")
                continue
            middle = order[len(order) // 2 - size // 2 :][:size]
            src_BS = collate(*data.take(middle)).src.to(at.device)
            limits = [int(n) for n in data.src.lengths[middle]]
            translate(model, src_BS[: size // 4], 4, limits[: size // 4])
            at.wait()
            begun = time.perf_counter()
            hyps, steps = translate(model, src_BS, 4, limits)
            seconds = time.perf_counter() - begun
            name = f"{str(dtype)[6:]}, {size} sentences of {np.mean(limits):.0f} tokens, beam 4"
            report.add(f"{name}: target tokens", sum(len(hyp.tokens) for hyp in hyps) / seconds, "a second")
            report.add(f"{name}: a step", 1e3 * seconds / steps, "ms")
