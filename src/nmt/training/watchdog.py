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
"""Updates without a finite gradient, one after the other, after which a training is given up."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class GracefulShutdown:
    """Answers a signal that asks a training to end. Used as a context, around all of it.

    While steps are taken the signal is noted, so that all processes save at the same step; before and after that there
    is nothing to save, and it ends this process like any other. A repeat within AGAIN seconds, or during the save, is
    the same wish: whoever tells all processes to end tells torchrun too, which passes it on. A later one ends at once.
    """

    def __init__(self, world: World) -> None:
        self.world, self.noted, self.since = world, 0, 0.0
        self.steps = self.saves = self.told = False
        self.asked: AsyncWork | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "GracefulShutdown":
        if threading.current_thread() is threading.main_thread():  # Nobody else may have handlers.
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
        """A block that asks `requested` after each step."""
        self.steps = True
        yield
        self.steps = False
        if self.noted:  # In the moment since the last step was over.
            self._end()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A block that no repeat of a signal interrupts."""
        self.saves = True
        yield
        self.saves = False

    def requested(self, *, last: bool = False, wish: bool = False) -> tuple[int, bool]:
        """The signal that some process had got when this was last asked (0: none), and whether one wished to save.

        Equal on all. The answer is a step old, so that no step waits for it; after the last step, and alone, it is that
        of now. Where there is a signal the wish may be lost: a save follows anyway.
        """
        answer = 2 * self.noted + wish
        if self.world.size > 1:
            before, self.asked = self.asked, self.world.all_reduce_max(answer)
            answer = before.wait() if before else 0
            if last:
                answer, self.asked = max(answer, self.asked.wait()), None
        found, wished = answer // 2, answer % 2 == 1
        if (found or self.noted) and self.world.is_main and not self.told:
            self.told = True
            name = signal.Signals(found or self.noted).name
            log.info("train: %s; saving and stopping after %s step", name, "this" if found else "the next")
        return found, wished


@dataclass(frozen=True)
class PendingFlags:
    """A number on its way from a device to the host, which does not wait for it."""

    value: Tensor
    event: Any
    """Done when the number is there; None where it was from the start."""

    @staticmethod
    def of(value: Tensor) -> "PendingFlags":
        """Send for a number that the device is still to compute; torch copies it into pinned memory."""
        if value.device.type != "cuda":
            return PendingFlags(value, None)
        copy, event = value.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(value.device))
        return PendingFlags(copy, event)

    @property
    def is_here(self) -> bool:
        """Whether the number can be read without waiting."""
        return self.event is None or bool(self.event.query())

    def read(self) -> float:
        """The number, waited for if need be."""
        if self.event is not None:
            self.event.synchronize()
        return self.value.item()


class SkippedSteps:
    """Count steps that were skipped because of a non-finite gradient.

    Whether one was is read when it has arrived, so that no step waits for a device; a CPU's is there at once. When it
    arrives differs between processes, so what they find ends them only where all of them have read all: in `settle`.
    """

    def __init__(self, count: int = 0) -> None:
        self.count, self.in_a_row = count, 0
        self.unread: deque[tuple[int, PendingFlags, Sequence[int] | Numbers]] = deque()
        self.hopeless: NmtError | None = None

    def add(self, step: int, skipped: Tensor, rows: Sequence[int] | Numbers) -> None:
        """Record whether `step`, with these rows of the training text, was skipped; see `settle`."""
        self.unread.append((step, PendingFlags.of(skipped), rows))
        if skipped.device.type != "cuda":
            self.settle()
        while self.unread and self.unread[0][1].is_here:
            self._read()

    def settle(self) -> None:
        """Wait until all steps have been looked at. Raises NmtError after ten in a row."""
        while self.unread:
            self._read()
        if self.hopeless:
            raise self.hopeless

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
            self.hopeless = NmtError(
                f"steps {step - IN_A_ROW + 1:,} to {step:,}: the gradient was not finite {IN_A_ROW} times in a "
                f"row. The pairs of the last one are lines {lines}{more} of the clean training text.\n"
                "The weights and the checkpoints are as they were before. Try a lower optim.learning_rate, a "
                "longer optim.warmup_steps, or bfloat16 instead of float16."
            )


class Heartbeat(NoHeartbeat):
    """Writes where this process is, and warns when the next one has not moved for a while. Used as a context.

    Each process watches one other, so any unresponsive process is named by one of the rest. A process alone has
    nobody to watch. What is written is for the other processes and for people: `heartbeat/process-3.json`.
    """

    def __init__(self, folder: Path, world: World, silence: float) -> None:
        self.folder, self.world, self.silence = folder, world, silence
        self.place: dict[str, Any] = {"moves": 0, "step": 0, "doing": "getting ready", "rows": []}
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __call__(self, doing: str, rows: Sequence[int] | Numbers = (), step: int | None = None) -> None:
        """This process now does that, with these lines of the training text (from 0)."""
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
        last, since, told, beats = None, time.monotonic(), False, 0
        while not self.ended.wait(self.silence / 6):
            beats += 1
            try:
                self._write(beats)
                theirs = json.loads(self._file(self._next()).read_bytes())
            except (OSError, ValueError):
                continue  # A disk that is full for a moment, or a process that has ended: not for this thread to tell.
            # Who waits for another has moved on, or stands at the same place; who has not been heard of stands still.
            moved = (theirs["beats"], theirs["moves"] if theirs["moves"] < self.place["moves"] else -1)
            silent = last is not None and (moved[0] == last[0] or (moved[1] == last[1] != -1))
            if not silent:
                last, since, told = moved, time.monotonic(), False
            elif not told and time.monotonic() - since > self.silence:
                log.warning("train: %s", self._sentence(theirs))
                told = True

    def _sentence(self, theirs: dict[str, Any]) -> str:
        rows = f", pairs {', '.join(str(row + 1) for row in theirs['rows'])}" if theirs["rows"] else ""
        return (
            f"process {self._next()} of {self.world.size} has been unresponsive for {self.silence:.0f} s: pid "
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
    """What ends a training that was asked to end by a signal, after it has saved."""
    name = signal.Signals(number).name
    return Preempted(f"stopped by {name} after step {step:,}, which is saved; the same command resumes.", number)
