"""What a training reports: short lines on the terminal, every measurement to TensorBoard and metrics.jsonl."""

import contextlib
import json
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from nmt.errors import writing
from nmt.io import lines_of, write_lines
from nmt.runs.run_dir import RunDir

log = logging.getLogger(__name__)

QUIET = 30.0
"""Seconds without a line after which one says how far the training is, where no progress bar does."""

FACTS = {
    "train": {
        "loss": "loss {loss:.3f}",
        "learning_rate": "lr {learning_rate:.3g}",
        "tokens_per_second": "{tokens_per_second:,.0f} tokens/s",
        "skipped": "{skipped:,} skipped",
    },
    "dev": {"loss": "dev loss {loss:.3f}", "bleu": "dev BLEU {bleu:.2f} ({sentences:,} sentences)"},
}
"""What the terminal shows of the measurements, as far as there are any; of skipped steps only if there are some."""

SHOWN, WIDTH = 2, 80
"""Translations of dev sentences on the terminal, and characters of each text; TensorBoard has the whole."""


class Board:
    """A training's event file for TensorBoard.

    Not torch's SummaryWriter: its thread writes up to two minutes late, loses that when the process is killed, and
    meets a full disk where nobody can answer.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # Files are read in the order of their names; others begin them with the time, but clocks are set back.
        pattern = re.compile(r"events\.out\.tfevents\.(\d+)\..*")
        numbers = [int(found[1]) for path in folder.iterdir() if (found := pattern.fullmatch(path.name))]
        self.path = folder / f"events.out.tfevents.{max(numbers, default=0) + 1:010}.nmt"
        self._stream = open(self.path, "wb")  # noqa: SIM115
        self._records = RecordWriter(self._stream)
        self._write(file_version="brain.Event:2")
        # Steps after the checkpoint that this training goes on from are measured again: readers drop the old ones.
        self._write(step=first_step + 1, session_log=SessionLog(status=SessionLog.START))

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A point of each curve."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        rows = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step=step, summary=Summary(value=rows))

    def text(self, step: int, tag: str, text: str) -> None:
        """Markdown on the page of texts."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._write(step=step, summary=text_pb(tag, text))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        with writing(self.path):
            self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
            self._stream.flush()

    def close(self) -> None:
        """Nothing more will be written."""
        with writing(self.path):
            self._stream.close()


class MetricsLogger:
    """Logs metrics on rank 0; does nothing on other ranks. Used as a context manager."""

    def __init__(self, run: Path, *, first_step: int, last_step: int, writes: bool) -> None:
        self.writes = writes
        if not writes:
            return
        run.mkdir(parents=True, exist_ok=True)
        self.first, self.last, self.step = first_step, last_step, first_step
        self.begun = self.spoke = time.monotonic()
        self.metrics = RunDir(run).metrics_file
        self._cut(self.metrics, first_step)
        self.board = Board(RunDir(run).tensorboard, first_step)
        self.file = open(self.metrics, "a", encoding="utf-8")  # noqa: SIM115
        self.bar = tqdm(
            total=last_step, initial=first_step, unit="step", desc="train", disable=None, dynamic_ncols=True
        )
        if not self.bar.disable:
            # tqdm asks the clock on the wall, which may be set back; then it stands still, and has negative rates.
            self.bar._time = time.monotonic  # type: ignore[attr-defined]
            self.bar.start_t = self.bar.last_print_t = time.monotonic()

    @staticmethod
    def _cut(path: Path, step: int) -> None:
        """Take measurements after `step` out of a metrics file, and a last line that an interruption cut."""
        if path.exists():
            with open(path, "rb") as stream:
                kept = [line for line, whole in lines_of(stream) if whole and _step_of(line) <= step]
            write_lines(path, kept)

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.writes:
            self.bar.close()
            # What has already gone wrong is told, not what follows from it.
            with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
                self.board.close()
                with writing(self.metrics):
                    self.file.close()

    def advance(self) -> None:
        """One step is done."""
        if self.writes:
            self.bar.update()
            self.step += 1
            if self.bar.disable and time.monotonic() - self.spoke > QUIET:
                self.say(self._line(self.step))

    def log_scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Record measurements of a step; `kind` is train or dev and begins their names on TensorBoard."""
        if not self.writes:
            return
        self.board.log_scalars(step, {f"{kind}/{name}": value for name, value in values.items()})
        with writing(self.metrics):
            self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self.file.flush()
        shown = [name for name in FACTS[kind] if name in values and (values[name] or name != "skipped")]
        self.say(self._line(step, *(FACTS[kind][name].format(**values) for name in shown)))

    def log_translations(self, step: int, rows: list[tuple[str, str, str]]) -> None:
        """Show how fixed sentences are translated by now, as (src, ref, hyp)."""
        if not self.writes:
            return
        text = "\n\n".join(f"    src {src}\n    ref {ref}\n    hyp {hyp}" for src, ref, hyp in rows)
        self.board.text(step, "dev/translations", text)
        cut = [[text if len(text) <= WIDTH else text[: WIDTH - 1] + "…" for text in row] for row in rows[:SHOWN]]
        self.say("\n".join(f"  {src}  =>  {hyp}  (ref {ref})" for src, ref, hyp in cut))

    def _line(self, step: int, *facts: str) -> str:
        """Return the step and an ETA from the speed since this process started."""
        each = (time.monotonic() - self.begun) / max(1, step - self.first)
        left = [f"ETA {duration(each * (self.last - step))}"] if step < self.last else []
        return ", ".join([f"train: step {step:,}/{self.last:,}", *facts, *left])

    def say(self, text: str) -> None:
        """A line of the log, above the progress bar."""
        if self.writes:
            self.spoke = time.monotonic()
            with tqdm.external_write_mode():
                log.info(text)


def _step_of(line: str) -> float:
    """The step of a row of metrics; beyond all others if the line isn't one."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return float("inf")


def duration(seconds: float) -> str:
    """So many seconds, in the unit that a reader thinks in."""
    for unit, size, most in (("s", 1, 100), ("min", 60, 100 * 60), ("h", 3600, 72 * 3600)):
        if seconds < most:
            return f"{seconds / size:.{1 if size == 3600 else 0}f} {unit}"
    return f"{seconds / 86_400:,.1f} days"
