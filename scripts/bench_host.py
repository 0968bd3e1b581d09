"""What the host does besides the device, as a corpus grows: seconds to the first batch, milliseconds in a step.

    python scripts/bench_host.py [--pairs 1000000 20000000] [--steps 50] [--json]

Each corpus is made up, in a temporary folder, as files that `nmt encode` would write. There is no device: the model is
tiny and gives its loss at once, and between steps the host sleeps as long as a device would compute. What is left of a
step is the work of the host: with the next updates cut and padded by a thread meanwhile, as in a training, and without.
"""

import argparse
import contextlib
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nmt.config import load
from nmt.data.dataset import FORMAT, ParallelDataset, open_dataset
from nmt.data.prefetch import Prefetch
from nmt.distributed.world import World
from nmt.runs.identity import TrainPaths
from nmt.training.loop import AHEAD, Place, header, prepared, updates
from nmt.training.memory import worst_case_batch
from nmt.training.step import Trainer, Update, train_step
from nmt.training.validation import Progress
from nmt.training.watchdog import SkippedSteps

VOCAB = 32_000
MEAN = 25
"""Tokens of a sentence, as in the corpora of newspapers and parliaments."""

SMALL = ("model.layers=1", "model.d_model=8", "model.d_ff=8", "model.heads=1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[1_000_000, 20_000_000])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device-ms", type=float, default=30.0, help="what a device would compute between two steps")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    found = []
    for pairs in args.pairs:
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            write_corpus(Path(folder), pairs)
            made = time.perf_counter() - begun
            found.append({"pairs": pairs, "seconds_to_make": made, **measured(Path(folder), args)})
        if not args.json:
            print("  ".join(f"{name} {value:,.4g}" for name, value in found[-1].items()), flush=True)
    names = ("ms_a_step", "ms_a_step_without_thread")
    growth = {f"{name}_last_over_first": found[-1][name] / found[0][name] for name in names}
    print(json.dumps({"corpora": found, **growth}) if args.json else growth)


def write_corpus(folder: Path, pairs: int) -> None:
    """Random ids whose lengths are spread as those of sentences are, in the files of an encode folder."""
    rng, block, names = np.random.default_rng(0), 2**20, {}
    lengths = np.clip(rng.gamma(3, MEAN / 3, min(pairs, block)), 2, 6 * MEAN).astype(np.int64)
    ids = rng.integers(4, VOCAB, 2**22, dtype=np.uint16)
    ids[::MEAN] = 3  # Where the ends of sentences stand does not matter here.
    for language in ("en", "zh"):
        of_all = np.tile(lengths, -(-pairs // len(lengths)))[:pairs] + (rng.integers(0, 5, pairs, dtype=np.int64))
        offsets = np.concatenate([[0], np.cumsum(of_all)])
        names[f"train.{language}.offsets"] = [offsets]
        whole, rest = divmod(int(offsets[-1]), len(ids))
        names[f"train.{language}.ids"] = [*[ids] * whole, ids[:rest]]
    names["train.rows"] = [np.arange(pairs)]
    hashes = {}
    for name, arrays in names.items():
        digest = hashlib.sha256()
        with (folder / name).open("wb") as stream:
            for array in arrays:
                stream.write(array.data)
                digest.update(array.data)
        hashes[name] = digest.hexdigest()
    meta = {"format": FORMAT, "languages": ["en", "zh"], "vocab_size": [VOCAB, VOCAB], "sha256": hashes, "splits": {}}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


class Nothing(nn.Module):
    """Takes the place of the model and its loss; what it gives has a gradient, and is there at once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.first = next(model.parameters())

    def forward(self, src: Tensor, tgt_in: Tensor, tgt_out: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.first.flatten()[0] * 1e-6
        return loss, loss.detach()


class Still(torch.optim.Optimizer):
    """Takes the place of Adam."""

    def step(self, closure: object = None) -> None:
        """Nothing, in no time."""


def measured(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Open the corpus, begin, and take so many steps in either way."""
    config = load("base.yaml", [*SMALL, f"bpe.vocab_size={VOCAB}", "data.src=en", "data.tgt=zh", *args.set])
    world = World(0, 1, torch.device("cpu"))
    trainer = Trainer.build(config, world, (8, 8))  # No id is looked up.
    trainer = replace(trainer, parallel=Nothing(trainer.model), optimizer=Still(trainer.model.parameters(), {}))
    begun = time.perf_counter()
    data = open_dataset(folder, "train", "en", "zh")
    found = {"seconds_to_open": time.perf_counter() - begun}
    header(trainer, data, folder)
    worst_case_batch(trainer, data)
    with Prefetch(coming(trainer, data, folder), AHEAD) as ahead:
        next(ahead)
        found["seconds_to_first_batch"] = time.perf_counter() - begun
        found["ms_a_step"] = steps(trainer, ahead, args)
    with contextlib.closing(coming(trainer, data, folder)) as alone:
        next(alone)
        found["ms_a_step_without_thread"] = steps(trainer, alone, args)
    return found


def coming(trainer: Trainer, data: ParallelDataset, folder: Path) -> Iterator[tuple[Update, Place]]:
    """The updates of a training that begins."""
    paths = TrainPaths(clean=folder, bpe=folder, encode=folder, run=folder)
    tokenizers = None  # Nobody asks for them without BPE-dropout.
    return prepared(trainer, updates(trainer.config, paths, data, tokenizers, Progress()))  # type: ignore[arg-type]


def steps(trainer: Trainer, them: Iterator[tuple[Update, Place]], args: argparse.Namespace) -> float:
    """Milliseconds of the host in a step, the median."""
    skips, times = SkippedSteps(), []
    for step in range(1, args.steps + 1):
        time.sleep(args.device_ms / 1e3)
        begun = time.perf_counter()
        update, _ = next(them)
        stats = train_step(trainer, update, step)
        skips.add(step, stats.skipped, update.rows)
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
