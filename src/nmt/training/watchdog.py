"""Signals, skipped steps and unresponsive processes during training."""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from nmt.data.batching import Numbers
from nmt.distributed.launcher import AGAIN
from nmt.distributed.world import AsyncWork, World
from nmt.errors import NmtError, Preempted
from nmt.io import write_json
from nmt.training.step import NoHeartbeat

log = logging.getLogger(__name__)

IN_A_ROW = 10
"""Consecutive skipped steps after which training fails."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class GracefulShutdown:
    """Handle SIGTERM and SIGINT. A context manager around the whole training.

    During the steps a signal is recorded, so that all processes save at the same step; before and after them there is
    nothing to save, and the process ends at once. A repeat within AGAIN seconds, or during the save, is the same
    request: a scheduler signals all processes, torchrun among them, which passes it on. A later one ends at once.
    """

    def __init__(self, world: World) -> None:
        self.world, self.noted, self.since = world, 0, 0.0
        self.steps = self.saves = self.logged = False
        self.asked: AsyncWork | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "GracefulShutdown":
        if threading.current_thread() is threading.main_thread():  # Other threads cannot set handlers.
            self.before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.noted:
            self.noted, self.since = number, now
            if not self.steps:
                self._end()
        elif now - self.since > AGAIN and not self.saves:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _end(self) -> NoReturn:
        if self.noted == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + self.noted)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """The block of the steps, which calls `requested` after each."""
        self.steps = True
        yield
        self.steps = False
        if self.noted:  # It arrived after the last step.
            self._end()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The block of a save, which a repeated signal does not interrupt."""
        self.saves = True
        yield
        self.saves = False

    def requested(self, *, last: bool = False, wish: bool = False) -> tuple[int, bool]:
        """Return the signal that any process had received (0: none), and whether any wished to save.

        Equal on all processes. The result is one step old, so that no step waits for it; after the last step, and in a
        single process, it is current. A wish may be lost beside a signal: a save follows anyway.
        """
        answer = 2 * self.noted + wish
        if self.world.size > 1:
            before, self.asked = self.asked, self.world.all_reduce_max(answer)
            answer = before.wait() if before else 0
            if last:
                answer, self.asked = max(answer, self.asked.wait()), None
        found, wished = answer // 2, answer % 2 == 1
        if (found or self.noted) and self.world.is_main and not self.logged:
            self.logged = True
            name = signal.Signals(found or self.noted).name
            log.info("train: %s; saving and stopping after %s step", name, "this" if found else "the next")
        return found, wished


@dataclass(frozen=True)
class PendingFlag:
    """A number that is being copied from a device while the host continues."""

    value: Tensor
    event: Any
    """Completes with the copy; None if there is nothing to wait for."""

    @staticmethod
    def of(value: Tensor) -> "PendingFlag":
        """Start the copy of a number that the device may not have computed yet, into pinned memory."""
        if value.device.type != "cuda":
            return PendingFlag(value, None)
        copy, event = value.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(value.device))
        return PendingFlag(copy, event)

    @property
    def is_here(self) -> bool:
        """Whether the number can be read without waiting."""
        return self.event is None or bool(self.event.query())

    def read(self) -> float:
        """Return the number; wait for it if necessary."""
        if self.event is not None:
            self.event.synchronize()
        return self.value.item()


class SkippedSteps:
    """Count steps that were skipped because of a non-finite gradient.

    Flags are read when their copies have completed, so that no step waits for a device; on a CPU that is at once. When
    they complete differs between processes, so errors are raised only where all have read all flags: in `settle`.
    """

    def __init__(self, count: int = 0) -> None:
        self.count, self.in_a_row = count, 0
        self.unread: deque[tuple[int, PendingFlag, Sequence[int] | Numbers]] = deque()
        self.failure: NmtError | None = None

    def add(self, step: int, skipped: Tensor, rows: Sequence[int] | Numbers) -> None:
        """Record whether `step`, with these rows of the training text, was skipped; see `settle`."""
        self.unread.append((step, PendingFlag.of(skipped), rows))
        if skipped.device.type != "cuda":
            self.settle()
        while self.unread and self.unread[0][1].is_here:
            self._read()

    def settle(self) -> None:
        """Read all flags, waiting for them. Raises NmtError after ten skipped steps in a row."""
        while self.unread:
            self._read()
        if self.failure:
            raise self.failure

    def _read(self) -> None:
        step, skipped, rows = self.unread.popleft()
        if not skipped.read():
            self.in_a_row = 0
            return
        self.count, self.in_a_row = self.count + 1, self.in_a_row + 1
        log.warning("train step %s: non-finite gradient; step skipped", f"{step:,}")
        if self.in_a_row == IN_A_ROW:
            lines = ", ".join(str(row + 1) for row in sorted(rows)[:20])
            more = f" and {len(rows) - 20:,} more" if len(rows) > 20 else ""
            self.failure = NmtError(
                f"steps {step - IN_A_ROW + 1:,} to {step:,}: the gradient was not finite {IN_A_ROW} times in a "
                f"row. The pairs of the last one are lines {lines}{more} of the clean training text.\n"
                "The weights and the checkpoints are as they were before. Try a lower optim.learning_rate, a "
                "longer optim.warmup_steps, or bfloat16 instead of float16."
            )


class Heartbeat(NoHeartbeat):
    """Write what this process does, and warn when the next one makes no progress. A context manager.

    Each process watches one other, so any unresponsive process is named by one of the rest; a single process watches
    none. The files, `heartbeat/process-3.json` and so on, are also for people to read.
    """

    def __init__(self, folder: Path, world: World, timeout: float) -> None:
        self.folder, self.world, self.timeout = folder, world, timeout
        self.place: dict[str, Any] = {"moves": 0, "step": 0, "doing": "starting", "rows": []}
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __call__(self, doing: str, rows: Sequence[int] | Numbers = (), step: int | None = None) -> None:
        """Record what this process does, with which lines of the training text (from 0)."""
        now = self.place["step"] if step is None else step
        self.place = {"moves": self.place["moves"] + 1, "step": now, "doing": doing, "rows": rows}

    def __enter__(self) -> "Heartbeat":
        if self.world.size > 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(0)
            self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.world.size > 1:
            self.ended.set()
            self.thread.join()
            self._file(self.world.rank).unlink(missing_ok=True)

    def _run(self) -> None:
        last, since, warned, beats = None, time.monotonic(), False, 0
        while not self.ended.wait(self.timeout / 6):
            beats += 1
            try:
                self._write(beats)
                theirs = json.loads(self._file(self._next()).read_bytes())
            except (OSError, ValueError):
                continue  # A full disk, or a process that has ended: reported elsewhere.
            # A process that waits for another is level with or ahead of this one; only one behind counts as stuck.
            moved = (theirs["beats"], theirs["moves"] if theirs["moves"] < self.place["moves"] else -1)
            stuck = last is not None and (moved[0] == last[0] or (moved[1] == last[1] != -1))
            if not stuck:
                last, since, warned = moved, time.monotonic(), False
            elif not warned and time.monotonic() - since > self.timeout:
                log.warning("train: %s", self._sentence(theirs))
                warned = True

    def _sentence(self, theirs: dict[str, Any]) -> str:
        rows = f", pairs {', '.join(str(row + 1) for row in theirs['rows'])}" if theirs["rows"] else ""
        return (
            f"process {self._next()} of {self.world.size} has been unresponsive for {self.timeout:.0f} s: pid "
            f"{theirs['pid']} on {theirs['host']}, step {theirs['step']:,}, {theirs['doing']}{rows}"
        )

    def _next(self) -> int:
        return (self.world.rank + 1) % self.world.size

    def _file(self, rank: int) -> Path:
        return self.folder / f"process-{rank}.json"

    def _write(self, beats: int) -> None:
        place = self.place | {"rows": [int(row) for row in self.place["rows"][:10]], "beats": beats}
        write_json(self._file(self.world.rank), place | {"pid": os.getpid(), "host": os.uname().nodename})


def preempted(number: int, step: int) -> Preempted:
    """Return the exception that ends a training after a signal and a save."""
    name = signal.Signals(number).name
    return Preempted(f"stopped by {name} after step {step:,}, which is saved; the same command resumes.", number)
