"""What a training tells: one line on the terminal, TensorBoard, and metrics.jsonl."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

log = logging.getLogger(__name__)


class Tracker:
    """Writes measurements for one process; on the others it is silent. Used as a context."""

    def __init__(self, run: Path, *, first_step: int, last_step: int, writes: bool) -> None:
        self.writes = writes
        if not writes:
            return
        from torch.utils.tensorboard import SummaryWriter

        run.mkdir(parents=True, exist_ok=True)
        # Steps after the checkpoint that this training goes on from are measured again.
        self.board = SummaryWriter(str(run / "tensorboard"), purge_step=first_step + 1)
        self._cut(run / "metrics.jsonl", first_step)
        self.file = open(run / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self.bar = tqdm(
            total=last_step, initial=first_step, unit="step", desc="train", disable=None, dynamic_ncols=True
        )

    @staticmethod
    def _cut(path: Path, step: int) -> None:
        """Take measurements after `step` out of a metrics file, and a last line that an interruption cut."""
        if not path.exists():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row["step"] <= step:
                kept.append(line + "\n")
        path.write_text("".join(kept), encoding="utf-8")

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.writes:
            self.bar.close()
            self.file.close()
            self.board.close()

    def advance(self) -> None:
        """One step is done."""
        if self.writes:
            self.bar.update()

    def numbers(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Record measurements of a step; `kind` is train or dev and begins their names on TensorBoard."""
        if not self.writes:
            return
        for name, value in values.items():
            self.board.add_scalar(f"{kind}/{name}", value, step)
        self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self.file.flush()
        self.say(f"{kind} step {step:,}: " + ", ".join(f"{name} {_short(value)}" for name, value in values.items()))

    def translations(self, step: int, rows: list[tuple[str, str, str]]) -> None:
        """Show how fixed sentences are translated by now, as (src, ref, hyp)."""
        if not self.writes:
            return
        text = "\n\n".join(f"    src {src}\n    ref {ref}\n    hyp {hyp}" for src, ref, hyp in rows)
        self.board.add_text("dev/translations", text, step)
        self.say("\n".join(f"  {src}  =>  {hyp}  (ref {ref})" for src, ref, hyp in rows))

    def say(self, text: str) -> None:
        """A line of the log, above the progress bar."""
        if self.writes:
            with tqdm.external_write_mode():
                log.info(text)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
