"""Tiny trainings, to see how a real one would go: commands in processes of their own, started as a user starts them.

They are tiny by their settings and by nothing else, and they live in a temporary folder.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmt.distributed.launcher import die_with_parent, family
from nmt.errors import NmtError
from nmt.io import sha256_of
from nmt.runs.checkpoint import saved_steps
from nmt.runs.run_dir import RunDir

STEPS, SAVE_EVERY = 48, 8
TINY = (
    "model.layers=1", "model.decoder_layers=0", "model.d_model=32", "model.d_ff=64", "model.heads=2",
    "model.kv_heads=0", "train.batch_tokens=600", "optim.schedule=inverse_sqrt", "optim.learning_rate=1e-2",
    "optim.lr_factor=1", "optim.warmup_steps=8", "train.early_stop_patience=0", f"train.max_steps={STEPS}",
    "train.validate_every=1000000", "train.validate_sentences=0", f"train.save_every={SAVE_EVERY}",
    f"train.keep_checkpoints={STEPS // SAVE_EVERY}",
    "runtime.device_tokens=250", "runtime.log_every=1", "runtime.compile=false",
)  # fmt: skip
"""What makes any recipe's training a tiny one. An update is several micro-batches, and no checkpoint is removed."""

COMPARABLE = (
    "model.dropout=0", "model.attention_dropout=0", "model.activation_dropout=0", "bpe.dropout=0",
    "train.precision=float32", "train.max_steps=24", "train.save_every=24",
)  # fmt: skip
"""Dropout's masks and rounding to bfloat16 go by how an update is cut, which depends on the number of processes."""

LIMIT = 600
"""Seconds after which a tiny training counts as one that hangs."""


@dataclass(frozen=True)
class TrialRuns:
    """A temporary folder, and the command that trains in it."""

    folder: Path
    words: Sequence[str]
    """The recipe, as options of nmt train."""
    program: Sequence[str] = (sys.executable, "-m", "nmt")

    @contextlib.contextmanager
    def training(self, name: str, *more: str, processes: int = 1) -> Iterator[subprocess.Popen[bytes]]:
        """A training of the run `name`; when the block is left, however it is, no process of it is left."""
        # NMT_RUNS is not --name with a path, which no name is; the current folder, and with it every path in the
        # recipe, stays what it is.
        command = [*self.program, "train", *self.words, *options(TINY), "--name", name, *more]
        command += ["--processes", str(processes)]
        # A signal that came while the process starts would leave it to itself: it waits until there is one to be ended.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

        def begin() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            die_with_parent()

        try:
            with open(self.folder / f"{name}.log", "wb") as told:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=told,
                    stderr=told,
                    # What torch leaves behind goes with the rest.
                    env=os.environ | {"NMT_RUNS": str(self.folder), "TMPDIR": str(self.folder)},
                    preexec_fn=begin,
                )
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield process
        finally:
            for pid in family(process.pid) if process.poll() is None else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def train(self, name: str, *more: str, processes: int = 1) -> Path:
        """The run folder of a training that has ended; raises NmtError with its last words if it failed."""
        with self.training(name, *more, processes=processes) as process, contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT)
        if process.returncode:
            raise self._failure(name, process.returncode)
        return self.folder / name

    def kill(self, name: str, steps: int, pause: float) -> bool:
        """Kill a training `pause` seconds after it has taken so many steps; False if it was over before that."""
        begun, run = time.monotonic(), self.folder / name
        with self.training(name) as process:
            while process.poll() is None and len(_rows(run)) < steps and time.monotonic() - begun < LIMIT:
                time.sleep(0.002)
            time.sleep(pause)
            process.kill()
        if process.returncode not in (0, -signal.SIGKILL) or len(_rows(run)) < steps:
            raise self._failure(name, process.returncode)
        return process.returncode != 0 and not RunDir(run).final.exists()

    def _failure(self, name: str, code: int) -> NmtError:
        log = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        told = [line.strip() for line in log.split("\n") if any(map(str.isalpha, line))] or ["it said nothing"]
        ended = f"ended with {code}" if code >= 0 else f"was ended by signal {-code}, after {LIMIT} s at the latest"
        return NmtError(f"a training {ended}: {told[-1]}")


def read_losses(run: Path) -> list[float]:
    """The training loss of each step that was taken."""
    rows = [json.loads(row) for row in _rows(run)]
    return [row["loss"] for row in rows if row["kind"] == "train"]


def _rows(run: Path) -> list[str]:
    """The whole lines of a run's metrics, as far as there are any."""
    metrics = RunDir(run).metrics_file
    return metrics.read_text(encoding="utf-8").split("\n")[:-1] if metrics.exists() else []


def hashes(run: Path) -> list[str]:
    """SHA-256 of the weights and the optimizer as the training ended, and of the final model."""
    files = [
        path for folder in (saved_steps(run)[-1], RunDir(run).final) for path in sorted(folder.glob("*.safetensors"))
    ]
    return [sha256_of(path) for path in files]


def options(changes: Iterable[str]) -> list[str]:
    """Settings as words of a command line."""
    return [word for change in changes for word in ("--set", change)]
