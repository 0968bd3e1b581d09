"""Parts of check_gpu.py that say how fast training and decoding are, with the settings that the recipes have."""

import json
import resource
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from gpu_report import PAPER_VOCAB, Report, Setting, recipe, synthetic, updates_of
from nmt.config import Config
from nmt.corpus import Normaliser
from nmt.data.dataset import ParallelDataset
from nmt.decoding.options import Options
from nmt.decoding.translator import Translator
from nmt.distributed.gpu_defaults import Gpu, translate_tokens
from nmt.distributed.world import gpu_of
from nmt.model import loss
from nmt.model.flops import training_flops
from nmt.model.loss import label_smoothed_loss
from nmt.model.transformer import Transformer
from nmt.runs.identity import TrainPaths
from nmt.special_tokens import EOS
from nmt.training import loop as training
from nmt.training.metrics_logger import MetricsLogger
from nmt.training.step import NoHeartbeat, Trainer, prepare, train_step
from nmt.training.validation import DevSet, Progress
from nmt.training.watchdog import GracefulShutdown

NEVER = "1000000000"

# ── training, by the loop that nmt train has ────────────────────────────────────────────────────────────────────────


def speed(report: Report, at: Setting) -> None:
    """base as it is; then what each default gives, and big; last the loss by chunk size, and where the time goes."""
    peak = matrix_peak(report, at)
    data = synthetic(300 if at.tiny else 200_000, at.vocab)
    finest = 200 if at.tiny else 4096
    cases = [("base", ()), ("big", ()), ("base", ("train.precision=float32",)),
             ("base", (f"runtime.device_tokens={finest}",)), ("base-modern", ("runtime.compile=false",))]  # fmt: skip
    for name, changes in cases:
        with report.attempt(" ".join((name, *changes))):
            pace(report, at, name, changes, data, peak)
    with report.attempt("profile"):
        profile_steps(at, data)
    loss_chunks(report, at)


def compiled(report: Report, at: Setting) -> None:
    """Training with torch.compile, what matters most first: compiling takes a good part of the time."""
    peak = matrix_peak(report, at)
    data = synthetic(300 if at.tiny else 200_000, at.vocab)
    for name in ("base",) if at.tiny else ("base", "big"):
        for word in ("true", "false"):
            with report.attempt(f"{name}, compile {word}"):
                pace(report, at, name, (f"runtime.compile={word}",), data, peak)


def pairs(report: Report, at: Setting) -> None:
    """The same training on ten million pairs: how long until its first step, and what its host does in each."""
    count = 20_000 if at.tiny else 10_000_000
    begun = time.perf_counter()
    data = synthetic(count, at.vocab)
    report.at_most(f"{count:,} synthetic pairs made, s", time.perf_counter() - begun, 20)
    pace(report, at, "base", (), data, None, title=f"base on {count:,} pairs", steps=3 if at.tiny else 100)
    report.add("peak memory of the process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "GiB")


class FirstStep(NoHeartbeat):
    """Notes when the first step of a training begins to compute."""

    def __init__(self) -> None:
        self.time: float | None = None

    def __call__(self, doing, rows=(), step=None) -> None:
        if step is not None and doing.startswith("forward") and self.time is None:
            self.time = time.perf_counter()


@dataclass
class Training:
    """A new training of a recipe on data that are at hand, which the loop of nmt train takes further."""

    at: Setting
    config: Config
    data: ParallelDataset
    run: Path

    def __post_init__(self) -> None:
        self.first = FirstStep()
        trainer = Trainer.build(self.config, self.at.world, (self.at.vocab, self.at.vocab), self.first)
        self.trainer, self.progress = training.fit_memory(trainer, self.data, Progress())
        # Of the dev set the loss alone is asked for, so nobody needs a tokenizer.
        dev = synthetic(16, self.at.vocab, seed=9)
        self.dev = DevSet(dev, [], [], (None, None), None)  # type: ignore[arg-type]

    def take(self, steps: int) -> dict[str, float]:
        """So many steps of the loop, and what it measured of them; nothing is saved."""
        last = self.progress.step + steps
        config = self.trainer.config
        self.trainer = replace(
            self.trainer,
            config=replace(
                config, train=replace(config.train, max_steps=last), runtime=replace(config.runtime, log_every=last)
            ),
        )
        paths = TrainPaths(clean=self.run, bpe=self.run, encode=self.run, run=self.run)
        tracker = MetricsLogger(self.run, first_step=self.progress.step, last_step=last, writes=True)
        with GracefulShutdown(self.at.world) as stop, tracker, mock.patch.object(training.Saver, "save"):
            self.progress = training.loop(self.trainer, paths, self.data, self.dev, self.progress, tracker, stop)
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        return next(row for row in reversed(rows) if row["kind"] == "train")


def pace(
    report: Report, at: Setting, name: str, changes: tuple[str, ...], data: ParallelDataset, peak: float | None,
    title: str = "", steps: int = 0,
) -> None:  # fmt: skip
    """What the loop measures of a recipe with changes: tokens a second, MFU, the time of the host, memory.

    Over so many steps; 0 are those that take six seconds.
    """
    title = title or ", ".join((name, *(change.partition(".")[2].replace("=", " ") for change in changes)))
    if at.left < 8:
        report.add(title, "left out: no time")
        return
    quiet = ("train.validate_sentences=0", f"train.validate_every={NEVER}", f"train.save_every={NEVER}")
    small = ("train.batch_tokens=600",) if at.tiny else ()
    config = recipe(f"{name}.yaml", *quiet, *small, *changes, tiny=at.tiny)
    at.forget()
    with tempfile.TemporaryDirectory() as folder:
        one = Training(at, config, data, Path(folder))
        meant = one.trainer.config
        told = f"{meant.train.precision}, device_tokens {one.trainer.device_tokens:,}"
        report.add(f"{title}: what the defaults became", told)
        begun = time.perf_counter()
        one.take(2 if at.tiny else 10)
        at.wait()
        assert one.first.time is not None
        report.add(f"{title}: until the first step", one.first.time - begun, "s")
        report.add(f"{title}: the first steps, compiling included", time.perf_counter() - one.first.time, "s")
        if not steps:
            begun, few = time.perf_counter(), 2 if at.tiny else 5
            one.take(few)
            steps = 3 if at.tiny else max(5, int(min(6.0, at.left / 2) * few / (time.perf_counter() - begun)))
        found = one.take(steps)
    rate = found["tokens_per_second"]
    report.add(f"{title}: source and target tokens", rate, "a second")
    src, tgt = (column.lengths[:20_000].astype(float) for column in (data.src, data.tgt))
    flops = float(training_flops(config.model, at.vocab, src, tgt).sum()) / float(src.sum() + tgt.sum())
    if peak:
        report.add(f"{title}: MFU", 100 * flops * rate / peak, "% of the measured peak")
    host = {key.removeprefix("seconds_"): value for key, value in found.items() if key.startswith("seconds_")}
    for key, value in host.items():
        report.add(f"{title}: host, {key}, a step", 1e3 * value, "ms")
    report.add(f"{title}: padding", 100 * found["padding"], "%")
    report.add(f"{title}: peak memory", found["peak_memory_mib"] / 2**10, "GiB")


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


def profile_steps(at: Setting, data: ParallelDataset) -> None:
    """Which kernels three steps of base spend their time in, as profile.txt."""
    from torch.profiler import ProfilerActivity, profile

    at.forget()
    config = recipe("base.yaml", *(("train.batch_tokens=600",) if at.tiny else ()), tiny=at.tiny)
    trainer = Trainer.build(config, at.world, (at.vocab, at.vocab))
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


# ── translation, by the Translator of nmt translate ─────────────────────────────────────────────────────────────────


class Numbers:
    """A tokenizer whose text is the ids themselves."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def __len__(self) -> int:
        return self.vocab

    def encode(self, lines):
        """The ids of each line."""
        return [[int(word) for word in line.split()] for line in lines]

    def decode(self, rows):
        """Each row of ids as a line."""
        return [" ".join(map(str, row)) for row in rows]


@dataclass(frozen=True)
class Decoding:
    """A base model of random weights; it hardly ever ends by itself, so each translation is as long as its source."""

    at: Setting
    sentences: int

    @cached_property
    def lines(self) -> list[str]:
        data = synthetic(self.sentences, self.at.vocab, seed=5)
        return [" ".join(str(i) for i in row if i > EOS) for row in data.take(np.arange(len(data)))[0]]

    def translator(self, *changes: str) -> Translator:
        """With the settings of the recipe and changes; as many tokens in a batch as if translations might be longer."""
        config = recipe("base.yaml", *(f"translate.{change}" for change in changes), tiny=self.at.tiny)
        dtype = getattr(torch, config.translate.precision)
        torch.manual_seed(1)
        model = Transformer(config.model, self.at.vocab).to(self.at.device, dtype).eval()
        gpu: Gpu | None = gpu_of(self.at.device)
        tokens = translate_tokens(config.translate, config.model, dtype.itemsize, gpu)
        config = replace(config, translate=replace(config.translate, batch_tokens=tokens, max_length_offset=0))
        words = Numbers(self.at.vocab)
        normaliser = Normaliser("keep", {"en": False, "zh": False})
        return Translator(model, words, words, normaliser, config, self.at.device)  # type: ignore[arg-type]


def decode(report: Report, at: Setting) -> None:
    """Lines through Translator with default settings; then what each of them gives, and one line alone."""
    cases = ((), ("batch_tokens=4096",), ("precision=bfloat16",), ("beam=1",))
    work = Decoding(at, 24 if at.tiny else 4000)
    reference: list[str] = []
    for changes in cases:
        title = ", ".join(("defaults", *(change.replace("=", " ") for change in changes)))
        if at.left < 8:
            report.add(title, "left out: no time")
            continue
        with report.attempt(title):
            at.forget()
            translator = work.translator(*changes)
            # With a batch of 4,096 so many lines would take the time of all the rest.
            lines = work.lines[: len(work.lines) // 8] if changes == cases[1] else work.lines
            report.add(f"{title}: batch_tokens", translator.batch_tokens)
            translator.translate(lines[: len(lines) // 8])
            at.wait()
            begun = time.perf_counter()
            found = translator.translate(lines)
            seconds = time.perf_counter() - begun
            report.add(f"{title}: sentences of 25 tokens", len(lines) / seconds, "a second")
            report.add(f"{title}: target tokens", sum(len(text.split()) for text in found) / seconds, "a second")
            if at.device.type == "cuda":
                report.add(f"{title}: peak memory", torch.cuda.max_memory_allocated(at.device) / 2**30, "GiB")
            if not changes:
                reference = found
            elif changes == cases[1]:
                same = sum(a == b for a, b in zip(reference, found, strict=False)) / len(found)
                # A model of random weights has near ties everywhere, so that rounding chooses far more often.
                report.add(f"{title}: lines that are the same in other batches", 100 * same, "%")
    one_line(report, at, work)


def one_line(report: Report, at: Setting, work: Decoding) -> None:
    """How long a step takes for a single sentence of 25 tokens, greedy and in beam search."""
    for changes in (("beam=1",), (), ("precision=bfloat16",)):
        with report.attempt("one line"):
            translator = work.translator(*changes)
            line, steps = " ".join(["9"] * (6 if at.tiny else 100)), 6 if at.tiny else 100
            begun = 0.0
            for _ in range(2):
                at.wait()
                begun = time.perf_counter()
                list(translator.stream([line], Options(max_length=steps)))
            title = ", ".join(("one line", *(change.replace("=", " ") for change in changes or ("beam 4",))))
            report.add(f"{title}: a step", 1e3 * (time.perf_counter() - begun) / steps, "ms")
