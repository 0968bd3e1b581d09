"""Checkpoints, written by a background thread."""

import logging
import os
import threading
import time
from dataclasses import asdict, replace
from types import TracebackType

import torch
from torch import Tensor

from nmt.runs import checkpoint
from nmt.runs.run_dir import RunDir
from nmt.training.step import Trainer
from nmt.training.validation import Progress

log = logging.getLogger(__name__)


class Saver:
    """Saves a training. Used as a context, after which nothing is still to be written.

    The weights and Adam's moments are copied in host memory, which is made once, and a thread of the leader writes the
    copy: so steps wait for the copy alone, and what is written is the state of one step whatever follows. One
    checkpoint is written at a time; the next one waits. What goes wrong is raised by the next call.
    """

    def __init__(self, trainer: Trainer, run: RunDir) -> None:
        self.trainer, self.run = trainer, run
        self.copies: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.since = time.monotonic()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        elif self.thread:
            self.thread.join()

    def wishes(self) -> bool:
        """Whether `runtime.save_minutes` have gone by since the last save or wish; the leader's clock decides."""
        minutes = self.trainer.config.runtime.save_minutes
        wished = self.trainer.world.is_main and 0 < 60 * minutes <= time.monotonic() - self.since
        if wished:
            self.since = time.monotonic()
        return wished

    def save(self, progress: Progress, *, resumable: bool = True, best: bool = False) -> None:
        """Copy what is to be saved, and begin to write it: as the checkpoint of this step, as `best`, or both."""
        self.trainer.at("saving")
        self.wait()
        self.since = time.monotonic()
        if not self.trainer.world.is_main:
            return
        model = self.trainer.model
        weights = self._copied("model", model.state_dict())
        moments = checkpoint.optimizer_tensors(self.trainer.optimizer, model) if resumable else {}
        moments = self._copied("optimizer", moments)
        if self.trainer.world.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.world.device)
        scale = self.trainer.scaler.state_dict() or {"scale": 0.0, "_growth_tracker": 0}
        state = asdict(replace(progress, loss_scale=scale["scale"], scale_steps=scale["_growth_tracker"]))

        def write() -> None:
            started = time.perf_counter()
            try:
                if best:
                    checkpoint.save(self.run.best, weights, state)
                if resumable:
                    checkpoint.save(checkpoint.step_folder(self.run, progress.step), weights, state, moments)
                    train = self.trainer.config.train
                    checkpoint.prune(self.run, train.keep_checkpoints, train.save_every, progress.step)
                    write_status(self.trainer, self.run, "running", progress)
                warn_of_grace(time.perf_counter() - started)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=write, name="saving", daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Raise what has gone wrong in the thread."""
        if self.error:
            error, self.error = self.error, None
            raise error

    def wait(self) -> None:
        """Wait until what was begun is on the disk."""
        if self.thread:
            self.thread.join()
            self.thread = None
        self.check()

    def _copied(self, kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        copies = {}
        for name, tensor in tensors.items():
            copy = self.copies.get(f"{kind}.{name}")
            if copy is None:
                copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
                self.copies[f"{kind}.{name}"] = copy
            copies[name] = copy.copy_(tensor, non_blocking=True)
        return copies


def warn_of_grace(seconds: float) -> None:
    """Say so if a save takes more than half of the time that torchrun gives a process which it has told to end."""
    grace = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    if "TORCHELASTIC_RUN_ID" in os.environ and seconds > grace / 2:
        log.warning(
            "train: saving took %.0f s, more than half of the %.0f s that torchrun leaves for it after a signal; "
            "set TORCH_ELASTIC_SHUTDOWN_TIMEOUT to %.0f.",
            *(seconds, grace, 4 * seconds),
        )


def write_status(trainer: Trainer, run: RunDir, state: str, progress: Progress) -> None:
    """Say in status.json what becomes of the run."""
    if trainer.world.is_main:
        run.write_status({"state": state, **asdict(progress)})
