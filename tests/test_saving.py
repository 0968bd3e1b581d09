"""Checkpoints that a thread writes: of one step whatever follows, one at a time, and nothing is lost or spoilt."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forked import forked
from nmt.data.dataset import open_dataset
from nmt.errors import CheckpointError, Preempted
from nmt.runs import checkpoint
from nmt.runs.run_dir import RunDir
from nmt.training import loop, watchdog
from nmt.training import saver as saving
from nmt.training.loop import train_model
from nmt.training.saver import Saver
from nmt.training.step import Trainer, prepare, train_step
from nmt.training.validation import Progress
from test_checkpoint_kills import Moments
from tiny import ALONE, STEPS, at, equal, final, settings, state, weights


@pytest.fixture
def trainer(paths) -> Trainer:
    """A trainer that has taken a step."""
    found = Trainer.build(settings(), ALONE, (340, 340))
    step(found, paths, 1)
    return found


def step(trainer: Trainer, paths, number: int) -> None:
    train_step(trainer, prepare(trainer, open_dataset(paths.encode, "train", "en", "zh"), np.arange(9)), number)


def content(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = dict(trainer.model.state_dict()) | checkpoint.optimizer_tensors(trainer.optimizer, trainer.model)
    return {name: tensor.clone() for name, tensor in found.items()}


class Held:
    """`checkpoint.save` that waits until it may go on, and notes what was saved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.honest, self.may, self.began, self.saved = checkpoint.save, threading.Event(), threading.Event(), []
        monkeypatch.setattr(checkpoint, "save", self)

    def __call__(self, folder: Path, *content) -> None:
        self.began.set()
        assert self.may.wait(60)
        self.saved.append(folder.name)
        self.honest(folder, *content)


def test_a_checkpoint_is_of_its_step_whatever_the_training_does_before_it_is_written(
    trainer, paths, tmp_path, monkeypatch
):
    held, before = Held(monkeypatch), content(trainer)
    with Saver(trainer, RunDir(tmp_path)) as saver:
        saver.save(Progress(step=1, best_step=1), best=True)
        for number in (2, 3):
            step(trainer, paths, number)
        assert checkpoint.newest(tmp_path) is None, "nothing was waited for"
        held.may.set()
    assert not equal(content(trainer), before)
    for folder in (checkpoint.step_folder(tmp_path, 1), tmp_path / "best"):
        found, values = checkpoint.load(folder)
        assert equal(found, {name: before[name] for name in found})
        assert (values["step"], values["best_step"]) == (1, 1)
    moments = checkpoint.load_optimizer(checkpoint.step_folder(tmp_path, 1))
    assert equal(moments, {name: before[name] for name in moments})
    assert state(tmp_path)["step"] == 1


def test_the_next_save_waits_for_the_one_before_and_uses_its_memory_again(trainer, tmp_path, monkeypatch):
    held, memory = Held(monkeypatch), []
    with Saver(trainer, RunDir(tmp_path)) as saver:
        saver.save(Progress(step=5))
        memory.append({name: copy.data_ptr() for name, copy in saver.copies.items()})
        held.began.wait(60)
        threading.Timer(0.2, held.may.set).start()
        saver.save(Progress(step=10))
        assert held.saved[0] == "step-00000005", "it is on the disk before the copy changes"
        memory.append({name: copy.data_ptr() for name, copy in saver.copies.items()})
    assert memory[0] == memory[1]
    assert held.saved == ["step-00000005", "step-00000010"]
    assert "saving" not in [thread.name for thread in threading.enumerate()]


def test_a_best_model_alone_is_no_checkpoint_to_go_on_from(trainer, tmp_path):
    with Saver(trainer, RunDir(tmp_path)) as saver:
        saver.save(Progress(step=3), resumable=False, best=True)
        saver.wait()
        assert not any("optimizer" in name for name in saver.copies), "and its moments are not copied"
    assert checkpoint.newest(tmp_path) is None
    assert not (tmp_path / "status.json").exists()
    assert not (tmp_path / "best" / "optimizer.safetensors").exists()
    assert equal(checkpoint.load(tmp_path / "best")[0], dict(trainer.model.state_dict()))


@pytest.mark.parametrize("asks", ["check", "wait", "save", "the end"])
def test_what_goes_wrong_in_the_thread_is_raised_by_the_next_that_asks_and_once(trainer, tmp_path, monkeypatch, asks):
    def full(*_):
        raise OSError(28, "No space left on device")

    def saves() -> None:
        with Saver(trainer, RunDir(tmp_path)) as saver:
            saver.save(Progress(step=5))
            saver.thread.join()
            if asks == "save":
                saver.save(Progress(step=10))
            elif asks != "the end":
                getattr(saver, asks)()
            else:
                return  # The block's end asks.
        raise AssertionError("it has not been raised")

    with Saver(trainer, RunDir(tmp_path)) as saver:
        saver.save(Progress(step=1))
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000005: .*No space left.*Older checkpoints are"):
        saves()
    assert checkpoint.newest(tmp_path) == checkpoint.step_folder(tmp_path, 1)


def test_an_error_of_the_training_is_not_hidden_by_one_of_the_thread_which_still_ends_first(
    trainer, tmp_path, monkeypatch
):
    held = Held(monkeypatch)
    threading.Timer(0.2, held.may.set).start()

    def saves() -> None:
        with Saver(trainer, RunDir(tmp_path)) as saver:
            saver.save(Progress(step=5))
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        saves()
    assert checkpoint.newest(tmp_path) == checkpoint.step_folder(tmp_path, 5)


def test_the_training_ends_at_a_disk_that_is_full_and_goes_on_later(paths, tmp_path, monkeypatch):
    run, honest = at(paths, tmp_path / "run"), checkpoint.save_file
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device")
        patch.setattr(
            checkpoint, "save_file", lambda tensors, path: fail_at(path, "step-00000010", full, honest, tensors)
        )
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step-00000010: .*No space left"):
            train_model(settings(), run, ALONE)
    assert state(run.run)["state"] == "failed"
    assert checkpoint.newest(run.run) == checkpoint.step_folder(run.run, 5)
    train_model(settings(), run, ALONE)
    train_model(settings(), at(paths, tmp_path / "whole"), ALONE)
    assert equal(final(run.run), final(tmp_path / "whole"))


def fail_at(path: Path, name: str, error: Exception, honest: Callable, tensors: dict) -> None:
    if name in str(path):
        raise error
    honest(tensors, path)


# ── killed or told to end while the thread writes ───────────────────────────────────────────────────────────────────


def moments_of_the_saves(monkeypatch: pytest.MonkeyPatch, moments: Moments) -> None:
    """Count what the thread does to files, and nothing else that the process does."""
    honest = Saver.save

    def save(saver: Saver, progress: Progress, **more) -> None:
        honest(saver, progress, **more)

    counted = Moments.__call__

    def in_the_thread(self: Moments) -> None:
        if threading.current_thread().name == "saving":
            counted(self)

    monkeypatch.setattr(Moments, "__call__", in_the_thread)
    monkeypatch.setattr(Saver, "save", save)
    moments.watch()


@pytest.mark.slow
def test_a_training_killed_at_any_moment_inside_the_thread_ends_with_the_weights_of_one_that_was_not(
    paths, tmp_path, monkeypatch
):
    whole = at(paths, tmp_path / "whole")

    def train(run: Path, fatal: int) -> None:
        with monkeypatch.context() as patch:
            moments = Moments(fatal)
            moments_of_the_saves(patch, moments)
            train_model(settings(), at(paths, run), ALONE)
            os.write(2, f"moments={moments.count}".encode())

    ended = forked(lambda: train(whole.run, 0))
    assert ended.code == 0, ended.told
    count = int(ended.told.rpartition("moments=")[2])
    assert count > 100, "five checkpoints and two best ones, of some twenty moments each"
    for moment in range(1, count, 7):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        assert forked(lambda run=run, moment=moment: train(run, moment)).code == -signal.SIGKILL, moment
        train_model(settings(), at(paths, run), ALONE)
        assert equal(final(run), final(whole.run)), moment
        assert equal(weights(run, STEPS), weights(whole.run, STEPS)), moment
        assert [path for path in run.rglob("*") if path.name.startswith(".")] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_thread_writes_ends_the_training_after_both_saves(paths, tmp_path, monkeypatch, number):
    run, take_step = at(paths, tmp_path / "run"), loop.train_step
    with monkeypatch.context() as patch:
        held = Held(patch)

        def signalled(trainer, update, step):
            if step == 7:
                assert held.began.wait(60), "the checkpoint of step 5 is being written"
                os.kill(os.getpid(), number)
                threading.Timer(0.3, held.may.set).start()
            return take_step(trainer, update, step)

        patch.setattr(loop, "train_step", signalled)
        with pytest.raises(Preempted, match="after step 7, which is saved"):
            train_model(settings(), run, ALONE)
        assert held.saved == ["step-00000005", "step-00000007"]
    assert (state(run.run)["state"], state(run.run)["step"]) == ("preempted", 7)
    train_model(settings(), run, ALONE)
    train_model(settings(), at(paths, tmp_path / "whole"), ALONE)
    assert equal(final(run.run), final(tmp_path / "whole"))


# ── saves by minutes ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_save_is_wished_for_after_so_many_minutes_without_one_by_the_leader_alone(trainer, tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0]))
    hourly = replace(trainer, config=settings("runtime.save_minutes=60"))
    saver, never = (
        Saver(hourly, RunDir(tmp_path)),
        Saver(replace(trainer, config=settings("runtime.save_minutes=0")), RunDir(tmp_path)),
    )
    follower = Saver(replace(hourly, world=SimpleNamespace(is_main=False, device=ALONE.device)), RunDir(tmp_path))
    wishes = []
    for seconds in (3599, 1, 0, 3600, 1800):
        now[0] += seconds
        wishes.append(saver.wishes())
        assert not follower.wishes()
        assert not never.wishes()
    assert wishes == [False, True, False, True, False], "once, since the answer comes a step later"
    with saver:
        saver.save(Progress(step=5))
    now[0] += 3599
    assert not saver.wishes(), "a save by steps counts"


def test_a_training_saved_by_minutes_resumes_there_and_ends_as_one_that_was_not(paths, tmp_path, monkeypatch):
    run, wished, killed = at(paths, tmp_path / "run"), [], []

    def wishes(saver: Saver) -> bool:
        wished.append(len(wished) + 1)
        return wished[-1] % 3 == 0

    def step(trainer, update, number):
        if number == 14 and not killed:
            killed.append(checkpoint.newest(run.run).name)
            raise KeyboardInterrupt
        return take_step(trainer, update, number)

    take_step = loop.train_step
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "wishes", wishes)
        patch.setattr(loop, "train_step", step)
        with pytest.raises(KeyboardInterrupt):
            train_model(settings(), run, ALONE)
        train_model(settings(), run, ALONE)
    assert killed[0] in ("step-00000010", "step-00000012")
    train_model(settings(), at(paths, tmp_path / "whole"), ALONE)
    assert equal(final(run.run), final(tmp_path / "whole"))
    names = [[path.name for path in checkpoint.saved_steps(one)] for one in (run.run, tmp_path / "whole")]
    assert names[0] == names[1], "what was saved by minutes is neither kept nor averaged"
    assert state(run.run) == state(tmp_path / "whole")


def test_processes_agree_on_a_wish_and_on_a_signal_a_step_later():
    class Other:
        """A process beside this one, with the values that it gives."""

        def __init__(self, *theirs: int) -> None:
            self.theirs, self.size, self.is_main = iter(theirs), 2, True

        def all_reduce_max(self, value: int):
            found = max(value, next(self.theirs))
            return SimpleNamespace(wait=lambda: found)

    stop = watchdog.GracefulShutdown(Other(0, 0, 1, 0, 2 * signal.SIGTERM, 0))
    answers = [stop.requested(wish=wish) for wish in (True, False, False, False, True, False)]
    assert answers == [(0, False), (0, True), (0, False), (0, True), (0, False), (signal.SIGTERM, False)]
    last = watchdog.GracefulShutdown(Other(0, 1))
    assert [last.requested(), last.requested(last=True)] == [(0, False), (0, True)]
    alone = watchdog.GracefulShutdown(ALONE)
    assert [alone.requested(wish=wish) for wish in (True, False)] == [(0, True), (0, False)]
    alone.noted = signal.SIGINT
    assert alone.requested(wish=True) == (signal.SIGINT, True)
