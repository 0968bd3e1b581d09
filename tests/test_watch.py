"""What watches a training: updates without a finite gradient, memory that runs out, processes that fall silent."""

import hashlib
import json
import logging
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
import torch

from nmt.data.dataset import open_dataset
from nmt.distributed.world import World
from nmt.errors import NmtError
from nmt.runs import checkpoint
from nmt.training import loop, saver, step
from nmt.training.loop import train_model
from nmt.training.memory import probe_memory
from nmt.training.step import OutOfMemory, Trainer, prepare, train_step
from nmt.training.watchdog import Heartbeat, SkippedSteps
from tiny import ALONE, as_on_a_gpu, at, equal, final, metrics, settings, state, weights, worker


def digest(trainer: Trainer) -> str:
    moments = checkpoint.optimizer_tensors(trainer.optimizer, trainer.model)
    tensors = {**trainer.model.state_dict(), **moments}
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


def data_of(paths):
    return open_dataset(paths.encode, "train", "en", "zh")


def poison(monkeypatch, value: float, steps) -> None:
    """Make the loss of these steps no number."""
    take_step, loss_of, now = step.train_step, step.label_smoothed_loss, [0]

    def counting(trainer, update, number):
        now[0] = number
        return take_step(trainer, update, number)

    def poisoned(*arguments):
        loss, nll = loss_of(*arguments)
        return (loss * value, nll) if now[0] in steps else (loss, nll)

    monkeypatch.setattr(step, "label_smoothed_loss", poisoned)
    monkeypatch.setattr(loop, "train_step", counting)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_an_update_without_a_finite_gradient_changes_nothing(paths, monkeypatch, value, precision):
    trainer = Trainer.build(settings(f"train.precision={precision}"), ALONE, (340, 340))
    train_step(trainer, prepare(trainer, data_of(paths), np.arange(20)), 1)
    before = digest(trainer)
    loss_of = step.label_smoothed_loss
    monkeypatch.setattr(step, "label_smoothed_loss", lambda *a: (loss_of(*a)[0] * value, loss_of(*a)[1]))
    stats = train_step(trainer, prepare(trainer, data_of(paths), np.arange(20, 40)), 2)
    assert stats.skipped.item() == 1
    assert digest(trainer) == before
    monkeypatch.undo()
    assert train_step(trainer, prepare(trainer, data_of(paths), np.arange(20, 40)), 3).skipped.item() == 0
    assert digest(trainer) != before


def test_skipped_updates_are_counted_and_the_training_ends_well(paths, tmp_path, monkeypatch, caplog):
    poison(monkeypatch, float("nan"), {3, 4, 11})
    train_model(settings("runtime.log_every=1"), at(paths, tmp_path / "run"), ALONE)
    assert state(tmp_path / "run")["skipped"] == 3
    assert [row["skipped"] for row in metrics(tmp_path / "run")][-1] == 3
    assert all(tensor.isfinite().all() for tensor in final(tmp_path / "run").values())
    assert caplog.text.count("step skipped") == 3
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    moments = checkpoint.load_optimizer(checkpoint.step_folder(tmp_path / "run", 24))
    assert {float(v) for name, v in moments.items() if name.endswith(".step")} == {21.0}


def test_ten_in_a_row_end_the_training_and_keep_the_last_good_checkpoint(paths, tmp_path, monkeypatch):
    train_model(settings("train.max_steps=5"), at(paths, tmp_path / "good"), ALONE)
    poison(monkeypatch, float("inf"), range(6, 100))
    with pytest.raises(NmtError, match=r"steps 6 to 15: .* lines [\d, ]+.* of the clean training text") as ended:
        train_model(settings(), at(paths, tmp_path / "run"), ALONE)
    assert ended.value.exit_code == 1
    assert state(tmp_path / "run")["state"] == "failed"
    newest = checkpoint.newest(tmp_path / "run")
    assert equal(checkpoint.load(newest)[0], weights(tmp_path / "good", 5))


BAD, GOOD = torch.tensor(1.0), torch.tensor(0.0)


def test_what_a_cpu_computed_is_read_at_once_and_a_good_step_ends_a_row():
    skips = SkippedSteps()
    for number, (skipped, count, in_a_row) in enumerate([(BAD, 1, 1), (BAD, 2, 2), (GOOD, 2, 0)], 1):
        skips.add(number, skipped, [7])
        assert (skips.count, skips.in_a_row) == (count, in_a_row)
    for number in range(4, 13):
        skips.add(number, BAD, [7])
    assert (skips.count, skips.in_a_row) == (11, 9)
    with pytest.raises(NmtError, match=r"steps 4 to 13: .*lines 1, 2, .*, 20 and 10 more"):
        skips.add(13, BAD, np.arange(30))


class Gpu:
    """A device whose steps get done when it is told so, and numbers on it that nobody may read."""

    def __init__(self, monkeypatch) -> None:
        self.done, self.sent, self.waits = 0, 0, 0
        gpu = self

        class Event:
            def __init__(self):
                gpu.sent += 1
                self.number = gpu.sent

            def record(self, stream):
                assert stream == "the stream of cuda:1"

            def query(self):
                return self.number <= gpu.done

            def synchronize(self):
                gpu.waits += not self.query()
                gpu.done = max(gpu.done, self.number)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")

    def number(self, value: float):
        class Number:
            device = torch.device("cuda", 1)

            def to(self, device, *, non_blocking):
                assert (device, non_blocking) == ("cpu", True)
                return torch.tensor(value)

        return Number()


def test_what_a_gpu_computes_is_read_when_it_is_done_and_never_waited_for_in_a_step(monkeypatch):
    gpu, skips = Gpu(monkeypatch), SkippedSteps()
    for number in range(1, 9):
        skips.add(number, gpu.number(number % 2), [7])
        if number == 5:
            gpu.done = 3
    assert (skips.count, gpu.waits, len(skips.unread)) == (2, 0, 5)
    skips.settle()
    assert (skips.count, skips.in_a_row, gpu.waits) == (4, 0, 5), "before a save all of them count"


@pytest.mark.parametrize("seen", [0, 4, 12, 15])
def test_ten_in_a_row_of_a_gpu_end_all_processes_at_the_same_step_whenever_each_was_told(monkeypatch, seen):
    gpu, skips = Gpu(monkeypatch), SkippedSteps()
    for number in range(1, 16):
        gpu.done = min(seen, number)
        skips.add(number, gpu.number(3 <= number <= 12), [number])  # Raises nowhere: the next process may not know.
    with pytest.raises(NmtError, match=r"steps 3 to 12: .* The pairs of the last one are lines 13 of the clean"):
        skips.settle()


def test_the_scale_of_float16_is_kept_in_the_checkpoint(paths, tmp_path):
    config = settings("train.precision=float16", "train.max_steps=12")
    train_model(config, at(paths, tmp_path / "whole"), ALONE)
    cut = at(paths, tmp_path / "cut")
    train_model(settings("train.precision=float16", "train.max_steps=7"), cut, ALONE)
    saved = checkpoint.load(checkpoint.newest(cut.run))[1]
    assert (saved["loss_scale"], saved["scale_steps"]) == (65536.0, 7)
    train_model(config, cut, ALONE)
    assert equal(final(cut.run), final(tmp_path / "whole"))
    assert checkpoint.load(checkpoint.newest(cut.run))[1]["scale_steps"] == 12


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def small_memory(monkeypatch, slots: int) -> list[int]:
    """Let every forward pass with more padded tokens than this run out of memory, as torch's CPU allocator words it."""
    forward, seen = step.TrainingModel.forward, []

    def limited(self, src, tgt, out, real):
        seen.append(max(src.numel(), tgt.numel()))
        if seen[-1] > slots:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return forward(self, src, tgt, out, real)

    monkeypatch.setattr(step.TrainingModel, "forward", limited)
    return seen


def test_the_largest_micro_batch_comes_first_and_leaves_no_trace(paths, monkeypatch):
    data, seen = data_of(paths), small_memory(monkeypatch, 10**9)
    trainer = Trainer.build(settings(), ALONE, (340, 340))
    torch.manual_seed(7)
    before, expected = digest(trainer), torch.rand(3)
    torch.manual_seed(7)
    trainer = probe_memory(trainer, data)
    assert torch.equal(torch.rand(3), expected)
    assert digest(trainer) == before
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    first = seen[0]
    for number in range(5):
        train_step(trainer, prepare(trainer, data, np.random.default_rng(number).permutation(150)[:30]), number + 1)
    assert max(seen[1:]) <= first <= trainer.device_tokens


def test_what_does_not_fit_is_told_before_the_first_step_with_what_to_lower(paths, tmp_path, monkeypatch):
    small_memory(monkeypatch, 20)
    with pytest.raises(OutOfMemory) as told:
        train_model(settings(), at(paths, tmp_path / "run"), ALONE)
    for words in (
        "a micro-batch of",
        "padded tokens",
        "longest pair has",
        "line ",
        "Lower runtime.device_tokens (now 40",
    ):
        assert words in str(told.value)
    assert checkpoint.saved_steps(tmp_path / "run") == []
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_real_failed_allocation_is_told_the_same_way(paths):
    trainer, data = Trainer.build(settings(), ALONE, (340, 340)), data_of(paths)
    with pytest.raises(OutOfMemory, match="out of memory"), step.oom_context(trainer, data, np.arange(5)):
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="something else"), step.oom_context(trainer, data, np.arange(5)):
        raise RuntimeError("something else")


def test_auto_finds_the_largest_limit_that_fits_and_goes_on_with_it(paths, tmp_path, monkeypatch, caplog):
    as_on_a_gpu(monkeypatch)
    with monkeypatch.context() as patch:
        small_memory(patch, 90)
        patch.setattr(loop, "validate", lambda trainer, dev, progress, tracker: progress)
        patch.setattr(loop, "choose_final", lambda *_: None)
        run = at(paths, tmp_path / "run")
        with caplog.at_level(logging.INFO):
            train_model(settings("runtime.device_tokens=auto", "train.max_steps=6"), run, ALONE)
    found = state(run.run)["device_tokens"]
    assert 60 <= found <= 90
    assert f"runtime.device_tokens is {found}" in caplog.text
    train_model(settings("runtime.device_tokens=auto"), run, ALONE)  # There would be room for all now.
    assert state(run.run)["device_tokens"] == found
    train_model(settings(f"runtime.device_tokens={found}"), at(paths, tmp_path / "told"), ALONE)
    assert equal(weights(run.run), weights(tmp_path / "told"))
    with monkeypatch.context() as patch:
        small_memory(patch, 1)
        with pytest.raises(OutOfMemory):
            train_model(settings("runtime.device_tokens=auto"), at(paths, tmp_path / "none"), ALONE)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_a_failed_attempt_computed_is_gone_before_the_next_one(paths, monkeypatch, where):
    forward, empty_like = step.TrainingModel.forward, torch.empty_like
    kept, attempts = [], []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(weakref.ref(tensor))
        return tensor

    def fail(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    def limited(self, src, tgt, out, real):
        attempts.append(sum(ref() is not None for ref in kept) - moments)
        loss, nll = forward(self, keep(src), keep(tgt), keep(out), keep(real))
        if max(src.numel(), tgt.numel()) > 60:
            if where == "forward":
                fail(keep(loss))
            loss.register_hook(fail)
        return keep(loss), nll

    as_on_a_gpu(monkeypatch)
    trainer = Trainer.build(settings("runtime.device_tokens=auto"), ALONE, (340, 340))
    moments = 2 * len(list(trainer.model.parameters()))  # Those of the attempt that begins.
    monkeypatch.setattr(step.TrainingModel, "forward", limited)
    monkeypatch.setattr(torch, "empty_like", lambda like, **more: keep(empty_like(like, **more)))
    assert probe_memory(trainer, data_of(paths)).device_tokens <= 60
    assert len(attempts) > 2
    assert set(attempts) == {0}


# ── silence ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def wait_for(words: str, caplog, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if words in caplog.text:
            return True
        time.sleep(0.05)
    return False


def test_a_process_that_falls_behind_is_named_with_its_step_and_pairs(tmp_path, caplog):
    one, two = (Heartbeat(tmp_path, World(rank, 2, torch.device("cpu")), timeout=0.6) for rank in range(2))
    with one, two:
        for heartbeat in (one, two):
            heartbeat("forward pass of micro-batch 1 of 2", [3, 4], 12)
        one("backward pass of micro-batch 1 of 2", [3, 4], 12)  # It goes on; the other does not.
        assert wait_for("process 1 of 2 has been unresponsive", caplog)
    assert "step 12, forward pass of micro-batch 1 of 2, pairs 4, 5" in caplog.text
    assert "process 0 of 2" not in caplog.text
    assert caplog.text.count("unresponsive") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_not_heard_of_is_named_and_one_that_waits_is_not(tmp_path, caplog):
    heartbeat = Heartbeat(tmp_path, World(0, 2, torch.device("cpu")), timeout=0.6)
    place = {"moves": 5, "step": 3, "doing": "saving", "rows": [], "beats": 1, "pid": 4711, "host": "node7"}
    with heartbeat:
        for beats in range(12):  # It stands at the same place as this one, and its thread is alive.
            (tmp_path / "process-1.json").write_text(json.dumps(place | {"beats": beats, "moves": 0}))
            time.sleep(0.1)
        assert "silent" not in caplog.text
        assert wait_for("process 1 of 2 has been unresponsive for 1 s: pid 4711 on node7, step 3, saving", caplog)


def test_a_process_alone_has_no_heartbeat(tmp_path):
    with Heartbeat(tmp_path / "heartbeat", ALONE, timeout=0.1) as heartbeat:
        heartbeat("anything", [], 1)
    assert not (tmp_path / "heartbeat").exists()


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("under_torchrun", "seconds", "told"), [(True, 16, True), (True, 14, False), (False, 99, False)]
)
def test_a_save_that_is_slow_for_torchrun_is_told(monkeypatch, caplog, under_torchrun, seconds, told):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    saver.warn_of_grace(seconds)
    assert ("set TORCH_ELASTIC_SHUTDOWN_TIMEOUT to 64" in caplog.text) == told


LOOKING = """
import os, threading, time
from nmt.training import loop
take_step = loop.train_step
def looking(trainer, update, step):
    if step in (2000, 20000):
        pages = int(open("/proc/self/statm").read().split()[1])
        while any(thread.name == "prefetch" for thread in threading.enumerate()):  # Until it is ahead, and ends.
            time.sleep(0.01)
        counts = pages, len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))
        print("counts", *counts, file=sys.stderr)
    return take_step(trainer, update, step)
loop.train_step = looking
"""


@pytest.mark.slow
def test_a_long_training_leaks_nothing(paths, tmp_path):
    changes = ("train.max_steps=20000", "train.batch_tokens=30", "model.d_model=8", "model.d_ff=8", "bpe.dropout=0.1")
    looking = ("runtime.log_every=100", "train.save_every=500", "train.validate_every=1000")
    command = worker(settings(*changes, *looking), at(paths, tmp_path / "run"), LOOKING)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split()[1:] for line in done.stderr.split("\n") if line.startswith("counts")]
    (pages, *others), (later, *after) = [[int(value) for value in line] for line in lines]
    assert later <= 1.05 * pages
    assert after == others, "file descriptors, Python threads, threads"
