"""A training so small that it takes a second, for the tests of everything around one; conftest.py makes its corpus."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nmt.config import BpeConfig, Config, EncodeConfig, load, to_dict
from nmt.corpus import Normaliser
from nmt.corpus.guard import leaks
from nmt.corpus.parallel import Workers
from nmt.data.dataset import encode_corpus
from nmt.data.train_tokenizer import train_bpe
from nmt.distributed.gpu_defaults import Gpu
from nmt.distributed.launcher import die_with_parent
from nmt.distributed.world import World
from nmt.io import write_lines
from nmt.runs import checkpoint
from nmt.runs.identity import TrainPaths
from nmt.training import resume, step

ALONE = World(0, 1, torch.device("cpu"))
STEPS = 24
SETTINGS = [
    *("model.layers=1", "model.d_model=16", "model.d_ff=32", "model.heads=2", "model.dropout=0.2"),
    *("bpe.vocab_size=340", "train.batch_tokens=150", f"train.max_steps={STEPS}", "optim.warmup_steps=10"),
    *(
        "runtime.device_tokens=40",
        "train.validate_every=12",
        "train.save_every=5",
        "runtime.log_every=4",
        "train.keep_checkpoints=3",
    ),
    *("train.validate_sentences=3", "translate.max_length_offset=3"),
]


def settings(*changes: str) -> Config:
    return load(None, [*SETTINGS, *changes])


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, *, bfloat16: bool = False) -> None:
    """Let `auto` mean what it means on a GPU of 80 GiB; what is computed stays on the CPU."""
    for module in (step, resume):
        monkeypatch.setattr(module, "gpu_of", lambda device: Gpu(80 * 2**30, bfloat16))


def make_corpus(root: Path) -> TrainPaths:
    """A small corpus of ragged lengths, cleaned, cut and encoded."""
    rng = np.random.default_rng(0)
    words, signs = ["red", "green", "book", "cup", "three", "and"], "红绿书杯三和"
    rows = [rng.integers(0, 6, rng.integers(1, 12)) for _ in range(150)]
    for split, part in {"train": rows, "dev": rows[:9], "test": rows[:5]}.items():
        write_lines(root / f"{split}.en", [" ".join(words[i] for i in row) for row in part])
        write_lines(root / f"{split}.zh", ["".join(signs[i] for i in row) for row in part])
    normaliser = Normaliser("keep", {"en": False, "zh": True})
    normaliser.save(root / "normalisation.json")
    with Workers(1) as pool:
        leaks(root, normaliser, pool)  # It also writes the keys of the training text.
    for name in ("bpe", "encode"):
        (root / name).mkdir()
    train_bpe(root, BpeConfig(vocab_size=340, character_coverage=1.0), ("en", "zh"), root / "bpe")
    encode_corpus(root, root / "bpe", EncodeConfig(), ("en", "zh"), root / "encode")
    return TrainPaths(clean=root, bpe=root / "bpe", encode=root / "encode", run=root / "run")


def at(paths: TrainPaths, run: Path) -> TrainPaths:
    return replace(paths, run=run)


def weights(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return checkpoint.load(checkpoint.step_folder(run, step))[0]


def final(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(run / "final")[0]


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def metrics(run: Path, kind: str = "train") -> list[dict]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().split("\n")[:-1])
    return [row for row in rows if row["kind"] == kind]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in metrics(run)]


def state(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())


# ── several processes ───────────────────────────────────────────────────────────────────────────────────────────────

WORKER = """
import contextlib, json, os, sys
from pathlib import Path
given = json.loads(Path(sys.argv[1]).read_text())
from nmt.config import from_dict
from nmt.errors import NmtError
from nmt.runs.identity import TrainPaths
from nmt.pipeline.stages import train_here
config, paths = from_dict(given["config"]), TrainPaths(**{k: Path(v) for k, v in given["paths"].items()})
rank = int(os.environ.get("RANK", "0"))
exec(given["patch"])
try:
    train_here(config, paths, device="cpu")
except NmtError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
"""Trains as the command does; `patch` is code that is run before, to break something."""


def worker(config: Config, paths: TrainPaths, patch: str = "") -> list[str]:
    """The command of one process of a training."""
    folder = paths.run.parent / f"{paths.run.name}.worker"
    folder.mkdir(exist_ok=True)
    places = {name: str(getattr(paths, name)) for name in ("clean", "bpe", "encode", "run")}
    (folder / "given.json").write_text(json.dumps({"config": to_dict(config), "paths": places, "patch": patch}))
    (folder / "worker.py").write_text(WORKER)
    return [str(folder / "worker.py"), str(folder / "given.json")]


def start(command: list[str], size: int, *, ranks: range | None = None, port: int = 0) -> list[subprocess.Popen[str]]:
    """Start the processes of a world, or only these ranks of it, as a launcher does; their stderr is kept."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = port or probe.getsockname()[1]
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        for rank in ranks or range(size)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and stderr of each; the deadline only guards against a hang."""
    try:
        return [(process.wait(240), process.stderr.read()) for process in processes]
    finally:
        for process in processes:
            process.kill()


def train_together(config: Config, paths: TrainPaths, size: int, patch: str = "") -> None:
    """Train in so many processes, to a good end."""
    for code, errors in finish(start(worker(config, paths, patch), size)):
        assert code == 0, errors[-3000:]


def torchrun(command: list[str], size: int, *options: str, **more) -> subprocess.Popen[str]:
    """Start torchrun with this worker; its stderr is kept."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *options]
    return subprocess.Popen([*words, *command], stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent, **more)
