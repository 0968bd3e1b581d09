"""A process that is killed inside `save`, at any moment, leaves a whole checkpoint: the one before or the new one."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forked import forked
from nmt.io import read_object, sha256_of, write_json
from nmt.pipeline import engine
from nmt.runs import checkpoint

Action = Callable[[], object]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """What a kill leaves does not depend on fsync, which is slow; that it is called is a moment all the same."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Moments:
    """Counts what is done to files, and kills the process just before a chosen one; 0 lets it live."""

    CALLS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "open")

    def __init__(self, fatal: int) -> None:
        self.fatal, self.count = fatal, 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """A moment: each call that changes a file or makes it last, and each of four states of a file half written."""
        for name in self.CALLS:
            setattr(os, name, self._before(getattr(os, name)))
        save_file, write_text = checkpoint.save_file, Path.write_text

        def slowly(path: Path, write: Action) -> None:
            write()
            content = path.read_bytes()
            for size in sorted({0, min(10, len(content)), len(content) // 2, len(content) - 1}):
                path.write_bytes(content[:size])
                self()
            path.write_bytes(content)

        checkpoint.save_file = lambda tensors, path: slowly(path, lambda: save_file(tensors, path))
        Path.write_text = lambda path, *given, **named: slowly(path, lambda: write_text(path, *given, **named))

    def _before(self, call):
        def counted(*given, **named):
            self()
            return call(*given, **named)

        return counted


def moments_of(action: Action) -> int:
    """How many moments the action has."""

    def count() -> None:
        moments = Moments(0)
        moments.watch()
        action()
        os.write(2, str(moments.count).encode())

    ended = forked(count)
    assert ended.code == 0, ended.told
    return int(ended.told)


def killed(action: Action, moment: int) -> None:
    """Do the action in a process that is killed at the moment."""

    def die() -> None:
        Moments(moment).watch()
        action()

    assert forked(die).code == -signal.SIGKILL


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((5, 7), float(step)), "b": torch.arange(3) + step}


def save(folder: Path, step: int) -> None:
    checkpoint.save(folder, tensors(step), {"step": step}, {"a.exp_avg": torch.full((2,), float(step))})


def step_of(folder: Path) -> int:
    """The step of a checkpoint all of whose content is that of the step."""
    weights, state = checkpoint.load(folder)
    step = state["step"]
    assert all(torch.equal(weights[name], tensor) for name, tensor in tensors(step).items())
    assert checkpoint.load_optimizer(folder)["a.exp_avg"].tolist() == [step, step]
    return step


def left_overs(run: Path) -> list[Path]:
    return [path for path in run.rglob("*") if path.name.startswith(".") or path.name.endswith((".part", ".old"))]


def each_moment(tmp_path: Path, least: int, prepare: Callable[[Path], object], action: Callable[[Path], object]):
    """For each moment of the action, of which there are at least so many, the run folder that a kill left."""
    prepare(tmp_path / "whole")
    number = moments_of(lambda: action(tmp_path / "whole"))
    assert number >= least
    for moment in range(1, number + 1):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        prepare(run)
        killed(lambda run=run: action(run), moment)
        yield run


@pytest.mark.slow
def test_a_kill_at_any_moment_of_the_first_save_leaves_nothing_or_all_of_it(tmp_path):
    seen = set()
    for run in each_moment(tmp_path, 30, Path.mkdir, lambda run: save(checkpoint.step_folder(run, 10), 10)):
        folder = checkpoint.newest(run)
        seen.add(folder and step_of(folder))
        checkpoint.recover(run)
        save(checkpoint.step_folder(run, 20), 20)
        assert step_of(checkpoint.newest(run)) == 20
        assert left_overs(run) == []
    assert seen == {None, 10}


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_new_step_leaves_the_step_before_or_the_new_one(tmp_path):
    def action(run: Path) -> None:
        save(checkpoint.step_folder(run, 30), 30)
        checkpoint.prune(run, 2, 10, 30)

    seen = set()
    for run in each_moment(
        tmp_path, 35, lambda run: [save(checkpoint.step_folder(run, step), step) for step in (10, 20)], action
    ):
        seen.add(step_of(checkpoint.newest(run)))
        checkpoint.recover(run)
        action(run)
        assert [step_of(folder) for folder in checkpoint.saved_steps(run)] == [20, 30]
        assert left_overs(run) == []
    assert seen == {20, 30}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["best", "final", "checkpoints/step-00000010"])
def test_a_kill_at_any_moment_of_a_replacement_leaves_the_old_one_or_the_new_one_under_its_name(tmp_path, name):
    seen = set()
    for run in each_moment(tmp_path, 35, lambda run: save(run / name, 1), lambda run: save(run / name, 2)):
        before = step_of(run / name)
        assert checkpoint.fault(run / name) is None
        checkpoint.recover(run)
        assert (run / name / "manifest.json").exists()
        assert step_of(run / name) == before
        assert left_overs(run) == []
        seen.add(before)
    assert seen == {1, 2}


@pytest.mark.slow
def test_a_second_kill_at_any_moment_of_the_next_save_still_leaves_a_whole_one(tmp_path):
    # The first kill falls between the two renames, when only .best.old is whole.
    def between(run: Path) -> None:
        save(run / "best", 1)
        (run / "best").rename(run / ".best.old")
        shutil.copytree(run / ".best.old", run / ".best.part")

    for run in each_moment(tmp_path, 35, between, lambda run: save(run / "best", 2)):
        assert step_of(run / "best") in (1, 2)
        save(run / "best", 3)
        assert step_of(run / "best") == 3
        assert left_overs(run) == []


def test_a_kill_at_any_moment_of_recovery_loses_nothing(tmp_path):
    def between(run: Path) -> None:
        save(run / "best", 1)
        save(checkpoint.step_folder(run, 10), 10)
        (run / "best").rename(run / ".best.old")
        shutil.copytree(run / ".best.old", run / ".best.part")
        shutil.copytree(run / ".best.old", run / "checkpoints" / ".step-00000020.part")

    for run in each_moment(tmp_path, 10, between, checkpoint.recover):
        assert step_of(run / "best") == 1
        assert step_of(checkpoint.newest(run)) == 10


def test_a_kill_at_any_moment_of_writing_the_state_of_a_run_leaves_the_old_or_the_new_one(tmp_path):
    def action(run: Path) -> None:
        write_json(run / "status.json", {"step": 2})

    for run in each_moment(
        tmp_path, 1, lambda run: [run.mkdir(), write_json(run / "status.json", {"step": 1})], action
    ):
        checkpoint.recover(run)
        assert read_object(run / "status.json")["step"] in (1, 2)
        assert [path.name for path in run.iterdir()] == ["status.json"]


def test_recovery_leaves_what_other_stages_are_at_work_on(tmp_path):
    (tmp_path / ".translate.1a2b3c4d.part").mkdir()
    checkpoint.recover(tmp_path)
    assert (tmp_path / ".translate.1a2b3c4d.part").is_dir()


@pytest.mark.parametrize("failing", ["rename", "fsync", "mkdir"])
def test_an_error_or_a_stop_inside_save_leaves_the_old_one_and_nothing_beside_it(tmp_path, monkeypatch, failing):
    save(tmp_path / "best", 1)
    call = getattr(os, failing)
    for error in (OSError(5, "Input/output error"), SystemExit(143)):
        for number in range(1, 10):
            calls = iter(range(1, 100))

            def fail(*given, error=error, calls=calls, number=number, **named):
                if next(calls) == number:
                    raise error
                return call(*given, **named)

            with monkeypatch.context() as patch:
                patch.setattr(os, failing, fail)
                try:
                    save(tmp_path / "best", 2)
                except (checkpoint.CheckpointError, SystemExit):
                    assert step_of(tmp_path / "best") in (1, 2)
                else:
                    assert step_of(tmp_path / "best") == 2
            assert left_overs(tmp_path) == []
            save(tmp_path / "best", 1)


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_stage_leaves_it_fresh_or_to_be_done_again(tmp_path):
    def stage(run: Path) -> engine.Stage:
        def work(out: Path) -> None:
            (out / "text").write_text("one\ntwo\n")

        return engine.make_stage(
            "clean", reads={}, settings={}, action=work, writes=run / "clean-1", content_hash=sha256_of
        )

    def stale(run: Path) -> None:
        engine.act(stage(run))
        (run / "clean-1" / "text").write_text("cut")

    for run in each_moment(tmp_path, 10, stale, lambda run: engine.act(stage(run))):
        word = engine.status([stage(run)])[0].word
        if word == "up_to_date":
            assert (run / "clean-1" / "text").read_text() == "one\ntwo\n"
        for path in run.iterdir():
            os.utime(path, (0, 0))  # What was left behind is swept once it is old.
        engine.act(stage(run))
        assert engine.status([stage(run)])[0].word == "up_to_date"
        assert [path.name for path in run.iterdir()] == ["clean-1"]
