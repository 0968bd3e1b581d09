"""What the parts of check_gpu.py share: where results go, what a part is given, made-up data."""

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nmt.config import Config, load
from nmt.data.batching import Numbers, plan_epoch
from nmt.data.dataset import Column, ParallelDataset
from nmt.decoding.search import Hypothesis, beam_search, greedy_search
from nmt.distributed.world import World
from nmt.model.cached_decoder import CachedDecoder
from nmt.model.transformer import Transformer
from nmt.special_tokens import EOS, PAD

PAPER_VOCAB = 37_000
"""Pieces of the paper's English-German vocabulary."""

SMALL = ("layers=2", "d_model=32", "d_ff=64", "heads=4")


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
        shown = str(value) if isinstance(value, str) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        cells = (self.part, what, f"{shown} {unit}", "" if ok is None else "yes" if ok else "**NO**")
        line = f"| {' | '.join(cell.strip().replace('|', chr(92) + '|') for cell in cells)} |\n"
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
            self.add(what, explained(error), ok=False)


def explained(error: Exception) -> str:
    """The kind and the beginning of an error on one line that fits into a table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


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
    def vocab(self) -> int:
        return 300 if self.tiny else PAPER_VOCAB

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.begun)

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forget(self) -> None:
        """Give back what an earlier measurement held, so that the next one's peak is its own."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

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
    """Random ids whose lengths are spread as those of sentences are, source and target alike, eos at the end.

    Ten million pairs take some seconds: everything is drawn in the size that it is kept in.
    """
    rng = np.random.default_rng(seed)
    src_lengths = np.clip(rng.standard_gamma(3, pairs, np.float32) * (mean / 3), 2, 6 * mean).astype(np.int64)
    spread = 1 + 0.15 * rng.standard_normal(pairs, np.float32)
    tgt_lengths = np.clip(src_lengths * spread, 2, 6 * mean).astype(np.int64)

    def column(lengths: Numbers) -> Column:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = rng.integers(EOS + 1, vocab, offsets[-1], np.uint16)
        ids[offsets[1:] - 1] = EOS
        return Column(ids, offsets)

    return ParallelDataset(column(src_lengths), column(tgt_lengths), np.arange(pairs))


def relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The norm of the difference over the norm of what is expected, all tensors together, in float64 on the CPU."""
    pairs = [(a.detach().double().cpu(), b.detach().double().cpu()) for a, b in zip(found, expected, strict=True)]
    size = sum(float(b.square().sum()) for _, b in pairs)
    return float((sum(float((a - b).square().sum()) for a, b in pairs) / size) ** 0.5)


def updates_of(data: ParallelDataset, config: Config) -> list[Numbers]:
    train, lengths = config.train, (data.src.lengths, data.tgt.lengths)
    return next(plan_epoch(*lengths, train.batch_tokens, train.length_buckets, train.seed, 0))


@torch.no_grad()
def translate(
    model: Transformer, src_BS: Tensor, beam: int, limits: list[int] | None = None
) -> tuple[list[Hypothesis], int]:
    """The best translation of each row of ids, and how many steps the decoder took; at most 10 tokens longer."""
    limits = limits or [int(n) + 10 for n in (src_BS != PAD).sum(1)]
    decoder = CachedDecoder.of(model, src_BS, beam)
    if beam == 1:
        return greedy_search(decoder, limits, device=src_BS.device), decoder.length
    found = beam_search(decoder, limits, beam=beam, alpha=0.6, device=src_BS.device)
    return [best[0] for best in found], decoder.length
