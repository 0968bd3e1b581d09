"""What a training tells, read back: one value for each step, however often it died, and whatever the clock says."""

import ast
import contextlib
import io
import json
import logging
import os
import re
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from nmt.training.metrics_logger import MetricsLogger, duration

SOURCE = Path(__file__).parent.parent / "src/nmt"


def measure(run: Path, first: int, last: int, offset: float = 0.0) -> MetricsLogger:
    """Measure steps after `first` up to `last`, each as its number plus `offset`; the tracker is left open."""
    tracker = MetricsLogger(run, first_step=first, last_step=100, writes=True)
    for step in range(first + 1, last + 1):
        tracker.advance()
        tracker.log_scalars("train", step, {"loss": step + offset})
        if step % 5 == 0:
            tracker.log_scalars("dev", step, {"loss": step + offset, "bleu": 2.0 * step, "sentences": 9})
            tracker.log_translations(step, [("src", "ref", f"hyp {step} {offset}")])
    return tracker


def read_back(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves as TensorBoard's own reader finds them."""
    board = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def rows(run: Path) -> list[tuple[str, int, float]]:
    lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    return [(row["kind"], row["step"], row["loss"]) for row in map(json.loads, lines)]


def test_tensorboard_and_the_metrics_file_hold_what_was_measured(tmp_path):
    with measure(tmp_path, 0, 10):
        pass
    curves = read_back(tmp_path)
    assert curves["train/loss"] == [(step, float(step)) for step in range(1, 11)]
    assert curves["dev/bleu"] == [(5, 10.0), (10, 20.0)]
    assert [row for row in rows(tmp_path) if row[0] == "dev"] == [("dev", 5, 5.0), ("dev", 10, 10.0)]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in board.Tensors("dev/translations")] == [5, 10]
    assert b"hyp 10" in board.Tensors("dev/translations")[1].tensor_proto.string_val[0]


@pytest.mark.parametrize("clock", ["goes on", "stands still", "is set back", "is set to 1970"])
@pytest.mark.parametrize("end", ["closed", "killed", "killed in a write"])
def test_a_training_that_goes_on_has_one_value_for_each_step(tmp_path, monkeypatch, clock, end):
    # It died at step 17, 13 and 12; its newest checkpoints were those of steps 10, 5 and 10.
    times = {
        "goes on": [1.7e9, 1.7e9 + 60, 1.7e9 + 120, 1.7e9 + 180],
        "stands still": [1.7e9] * 4,
        "is set back": [1.7e9, 1.6e9, 1.5e9, 1.4e9],
        "is set to 1970": [1.7e9, 100, 50, 0],
    }[clock]
    for number, (first, last) in enumerate([(0, 17), (10, 13), (5, 12), (10, 20)]):
        monkeypatch.setattr(time, "time", lambda number=number: times[number])
        tracker = measure(tmp_path, first, last, offset=number / 10)
        if end == "closed" or last == 20:
            tracker.__exit__(None, None, None)
        elif end == "killed in a write":
            for path in (tracker.board.path, tmp_path / "metrics.jsonl"):
                path.write_bytes(path.read_bytes()[:-7])
    expected = [(n, n + (0.0 if n <= 5 else 0.2 if n <= 10 else 0.3)) for n in range(1, 21)]
    curves = read_back(tmp_path)
    assert [step for step, _ in curves["train/loss"]] == list(range(1, 21))
    assert [value for _, value in curves["train/loss"]] == pytest.approx([value for _, value in expected])
    assert [step for step, _ in curves["dev/loss"]] == [5, 10, 15, 20]
    assert [(step, loss) for kind, step, loss in rows(tmp_path) if kind == "train"] == expected


def test_files_of_torchs_own_writer_are_gone_on_from(tmp_path):
    with contextlib.closing(SummaryWriter(str(tmp_path / "tensorboard"))) as earlier:
        for step in range(1, 9):
            earlier.add_scalar("train/loss", step, step)
    with measure(tmp_path, 4, 6, offset=0.5):
        pass
    assert read_back(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.5), (6, 6.5)]


def test_what_is_measured_is_on_the_disk_at_once(tmp_path):
    tracker = measure(tmp_path, 0, 3)
    assert [step for step, _ in read_back(tmp_path)["train/loss"]] == [1, 2, 3]
    assert len(rows(tmp_path)) == 3
    tracker.__exit__(None, None, None)


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"[" * 100_000, b"[]", b"3", b'{"step": null}', b'{"kind": "train"}', b"{"]
)
def test_lines_that_are_no_measurements_are_dropped(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "train", "step": 1, "loss": 1.0}\n' + line + b"\n" + line)
    with measure(tmp_path, 1, 2):
        pass
    assert rows(tmp_path) == [("train", 1, 1.0), ("train", 2, 2.0)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_clock_that_is_set_back_makes_no_negative_rate_or_time(tmp_path, monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    begun = time.time()
    readings = iter(range(10**6))
    for module in (time, sys.modules["tqdm.std"]):
        monkeypatch.setattr(module, "time", lambda: begun - 3600 * next(readings))
    with MetricsLogger(tmp_path, first_step=10, last_step=100, writes=True) as tracker:
        for step in range(11, 31):
            tracker.advance()
            tracker.log_scalars("train", step, {"loss": 1.0})
            tracker.bar.refresh()
    bars = re.findall(r"train: +\d+%.*?\[.*?\]", shown.getvalue())
    assert bars
    assert "30/100" in bars[-1]
    assert [bar for bar in bars if "-" in bar.split("[")[1].replace("?", "")] == []


WALL_CLOCK = {
    ("pipeline.py", "cached_hashes"): "compares with a file's modification time",
    ("pipeline.py", "_sweep"): "compares with a folder's modification time",
    ("tracking.py", "_write"): "says when, not how long",
    ("provenance.py", "provenance"): "says when, not how long",
    ("launch.py", "write_error_file"): "is compared between processes, which have no other clock in common",
    ("launch.py", "_wait"): "compares with what leave_word wrote",
}


def test_no_duration_is_measured_by_the_clock_on_the_wall():
    wall = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "strftime", "ctime"}
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                # A clock taken out of its module would not be seen below.
                assert not {alias.name for alias in node.names} & (wall | {"datetime", "date"}), path
        for function in tree.body + [n for body in tree.body if isinstance(body, ast.ClassDef) for n in body.body]:
            calls = {
                (path.name, getattr(function, "name", ""))
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and node.attr in wall and isinstance(node.value, ast.Name)
                if node.value.id in ("time", "datetime", "date")
            }
            found |= calls if not isinstance(function, ast.ClassDef) else set()
    assert found == WALL_CLOCK.keys()


@pytest.mark.parametrize("name", ["tensorboard", "metrics.jsonl"])
def test_a_full_disk_is_told_at_once_with_the_path(tmp_path, name):
    tracker = measure(tmp_path, 0, 1)
    stream = tracker.board._stream if name == "tensorboard" else tracker.file
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), stream.fileno())
    with pytest.raises(OSError, match="No space left") as caught, tracker:
        tracker.log_scalars("train", 2, {"loss": 1.0})
    assert name in caught.value.filename


# ── the terminal ────────────────────────────────────────────────────────────────────────────────────────────────────

MEASURED = {
    "loss": 6.74567,
    "nll": 6.5,
    "learning_rate": 0.0015,
    "grad_norm": 1.2,
    "tokens_per_second": 19676.4,
    "padding": 0.03,
    "seconds_data": 0.001,
    "peak_memory_mib": 467.4,
    "epoch": 0,
    "skipped": 0,
}


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves by hand."""
    hand = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: hand[0])
    return hand


@pytest.mark.parametrize(
    ("kind", "values", "line"),
    [
        ("train", MEASURED, "train: step 20/100, loss 6.746, lr 0.0015, 19,676 tokens/s, ETA 40 s"),
        ("train", MEASURED | {"learning_rate": 0.0}, "train: step 20/100, loss 6.746, lr 0, 19,676 tokens/s, ETA 40 s"),
        ("train", MEASURED | {"skipped": 3},
         "train: step 20/100, loss 6.746, lr 0.0015, 19,676 tokens/s, 3 skipped, ETA 40 s"),
        ("train", {"tokens_per_second": 5.0, "skipped": 9}, "train: step 20/100, 5 tokens/s, 9 skipped, ETA 40 s"),
        ("dev", {"loss": 5.2031, "nll": 4.75, "ppl": 115.6, "bleu": 0.406, "sentences": 50, "seconds": 0.6},
         "train: step 20/100, dev loss 5.203, dev BLEU 0.41 (50 sentences), ETA 40 s"),
        ("dev", {"loss": 5.2031, "nll": 4.75, "ppl": 115.6, "seconds": 0.6},
         "train: step 20/100, dev loss 5.203, ETA 40 s"),
    ],
)  # fmt: skip
def test_the_terminal_gets_a_short_line_and_the_file_every_measurement(tmp_path, caplog, clock, kind, values, line):
    caplog.set_level(logging.INFO, "nmt")
    with MetricsLogger(tmp_path, first_step=0, last_step=100, writes=True) as tracker:
        clock[0] += 10
        tracker.log_scalars(kind, 20, values)
    assert caplog.messages == [line]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"kind": kind, "step": 20} | values
    assert {tag.split("/")[1] for tag in read_back(tmp_path)} == values.keys()


def test_what_is_left_is_judged_by_all_that_passed_since_this_process_began(tmp_path, caplog, clock):
    # 10 of the 60 steps that were missing, in 50 s, a validation included: 50 steps, 250 s are left.
    caplog.set_level(logging.INFO, "nmt")
    with MetricsLogger(tmp_path, first_step=40, last_step=100, writes=True) as tracker:
        clock[0] += 20
        tracker.log_scalars("train", 45, {"loss": 1.0})
        clock[0] += 30
        tracker.log_scalars("train", 50, {"loss": 1.0})
        tracker.log_scalars("train", 100, {"loss": 1.0})
    left = [message.partition("ETA ")[2] for message in caplog.messages]
    assert left == [duration(20 / 5 * 55), duration(50 / 10 * 50), ""]


def test_a_training_of_slow_steps_says_where_it_is_long_before_the_first_measurement(tmp_path, caplog, clock):
    caplog.set_level(logging.INFO, "nmt")
    with MetricsLogger(tmp_path, first_step=0, last_step=1000, writes=True) as tracker:
        for _ in range(8):
            clock[0] += 20
            tracker.advance()
    assert [message.split(",")[0] for message in caplog.messages] == [f"train: step {n}/1" for n in (2, 4, 6, 8)]


def test_where_a_bar_shows_the_steps_no_lines_do(tmp_path, caplog, clock, monkeypatch):
    caplog.set_level(logging.INFO, "nmt")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with MetricsLogger(tmp_path, first_step=0, last_step=10, writes=True) as tracker:
        for _ in range(4):
            clock[0] += 1000
            tracker.advance()
    assert caplog.messages == []


def test_a_process_that_does_not_write_is_silent(tmp_path, caplog, clock):
    caplog.set_level(logging.INFO, "nmt")
    with MetricsLogger(tmp_path, first_step=0, last_step=10, writes=False) as tracker:
        clock[0] += 1000
        tracker.advance()
        tracker.log_scalars("train", 1, MEASURED)
        tracker.log_translations(1, [("a", "b", "c")])
    assert caplog.messages == []
    assert list(tmp_path.iterdir()) == []


def test_the_terminal_shows_the_beginning_of_two_translations_and_tensorboard_all(tmp_path, caplog):
    caplog.set_level(logging.INFO, "nmt")
    rows = [("src", "参考", "hn" * 100), ("s" * 80, "r" * 81, ""), ("third", "third", "third")]
    with MetricsLogger(tmp_path, first_step=0, last_step=10, writes=True) as tracker:
        tracker.log_translations(5, rows)
    shown = caplog.messages[0].split("\n")
    assert shown == [
        f"  src  =>  {('hn' * 40)[:79]}…  (ref 参考)",
        f"  {'s' * 80}  =>    (ref {'r' * 79}…)",
    ]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    text = board.Tensors("dev/translations")[0].tensor_proto.string_val[0].decode()
    assert "hn" * 100 in text
    assert "third" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.6, "60 s"), (100, "2 min"), (3600, "60 min"), (6000, "1.7 h"), (86_400, "24.0 h"),
     (300_000, "3.5 days"), (1e8, "1,157.4 days")],
)  # fmt: skip
def test_durations_are_in_the_unit_that_a_reader_thinks_in(seconds, text):
    assert duration(seconds) == text
