"""A training that is killed, asked to end, or given other processes goes on as if nothing had been."""

import contextlib
import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forked import forked, forked_world
from nmt.config import Config
from nmt.errors import CheckpointError, ConfigError, Preempted
from nmt.pipeline.stages import train_here
from nmt.runs import checkpoint
from nmt.runs.identity import TrainPaths
from nmt.training import loop, watchdog
from nmt.training.loop import train_model
from nmt.training.saver import Saver
from tiny import ALONE, STEPS, at, equal, final, metrics, settings, state, weights


def in_child(config: Config, paths: TrainPaths) -> int:
    """Train in a forked child, which costs no start; returns its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            train_here(config, paths, device="cpu")
            code = 0
        except BaseException as error:
            code = getattr(error, "exit_code", 1)
        finally:
            os._exit(code)
    return child


@pytest.mark.slow
def test_a_training_killed_at_fifty_moments_ends_with_the_weights_of_one_that_was_not(paths, tmp_path):
    config = settings("train.max_steps=60", "runtime.log_every=1", "train.save_every=4", "bpe.dropout=0.1")
    started = time.monotonic()
    train_here(config, at(paths, tmp_path / "whole"), device="cpu")
    lasts = time.monotonic() - started
    chance, kills, folder = random.Random(1), 0, 0
    while kills < 50:
        run = tmp_path / f"cut {folder}"
        child = in_child(config, at(paths, run))
        time.sleep(chance.uniform(0, lasts / 3))
        os.kill(child, signal.SIGKILL)
        _, code = os.waitpid(child, 0)
        if os.WIFSIGNALED(code):
            kills += 1
            newest = checkpoint.newest(run)
            saved = int(newest.name[5:]) if newest else 0
            seen = [row["step"] for row in metrics(run)] if (run / "metrics.jsonl").exists() else []
            assert max(seen, default=0) - saved <= 8, "more was lost than an interval and the save being written"
            continue
        assert os.WEXITSTATUS(code) == 0
        assert equal(final(run), final(tmp_path / "whole"))
        folder += 1
    _, code = os.waitpid(in_child(config, at(paths, run)), 0)
    assert code == 0
    assert equal(final(run), final(tmp_path / "whole"))
    assert equal(weights(run, 60), weights(tmp_path / "whole", 60))
    assert [row["step"] for row in metrics(run)] == list(range(1, 61))
    left_over = [path for path in run.rglob("*") if path.suffix in (".part", ".old") or path.name.startswith(".")]
    assert left_over == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_answered_by_a_save_at_the_next_step(paths, tmp_path, monkeypatch, number):
    config, run = settings("bpe.dropout=0.1"), tmp_path / "run"
    take_step = loop.train_step

    def signalled(trainer, update, step):
        if step == 8:
            os.kill(os.getpid(), number)
        return take_step(trainer, update, step)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", signalled)
        with pytest.raises(Preempted, match="after step 8, which is saved") as stopped:
            train_model(config, at(paths, run), ALONE)
    assert stopped.value.exit_code == 128 + number
    assert signal.getsignal(number) == before
    assert (state(run)["state"], state(run)["step"]) == ("preempted", 8)
    assert checkpoint.newest(run) == checkpoint.step_folder(run, 8)
    train_model(config, at(paths, run), ALONE)
    train_model(config, at(paths, tmp_path / "whole"), ALONE)
    assert equal(final(run), final(tmp_path / "whole"))


INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize(
    ("signals", "ends"),
    [
        ([(0, INT)], 0),
        ([(0, TERM), (0.2, TERM)], 0),  # As torchrun passes it on.
        ([(0, TERM), (0.1, TERM), (0.2, TERM), (4.9, TERM)], 0),
        ([(0, INT), (0.5, TERM)], 0),
        ([(0, TERM), (5.1, TERM)], -TERM),
        ([(0, INT), (0.1, INT), (5.1, INT)], -INT),
        ([(0, TERM), (6, INT)], -INT),
        ([(0, TERM), (6, "save"), (7, TERM), (60, TERM)], 0),
        ([(0, "save"), (1, TERM), (9, TERM)], 0),
        ([(0, TERM), (6, "save"), (7, "saved"), (7.1, TERM)], -TERM),
    ],
)
def test_a_second_signal_ends_the_process_at_once_unless_within_seconds_or_during_the_save(signals, ends):
    def steps() -> None:
        with watchdog.GracefulShutdown(ALONE) as stop, contextlib.ExitStack() as stack:
            stack.enter_context(stop.stepping())
            for now, what in signals:
                watchdog.time = SimpleNamespace(monotonic=lambda now=now: 100.0 + now)
                if what == "save":
                    saving = stop.saving()
                    saving.__enter__()
                elif what == "saved":
                    saving.__exit__(None, None, None)
                else:
                    os.kill(os.getpid(), what)
            first = next(what for _, what in signals if isinstance(what, int))
            os._exit(0 if stop.requested() == (first, False) else 1)

    assert forked(steps).code == ends


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize("when", ["start-up", "after the last answer", "choice of the final model"])
def test_where_nothing_is_to_be_saved_the_first_signal_ends_as_usual_and_its_repeat_spoils_nothing(number, when):
    def training_of_two_steps() -> None:
        told = []
        try:
            with watchdog.GracefulShutdown(ALONE) as stop:
                try:
                    if when == "start-up":
                        os.kill(os.getpid(), number)
                    with stop.stepping():
                        stop.requested(last=True)
                        if when == "after the last answer":
                            os.kill(os.getpid(), number)
                            told.append("goes on to the end of the steps")
                    if when == "choice of the final model":
                        os.kill(os.getpid(), number)
                    told.append("not reached")
                except BaseException:
                    os.kill(os.getpid(), TERM)
                    told.append("what ends a training is done whole")
                    raise
        except KeyboardInterrupt:
            told.append(INT)
        except SystemExit as end:
            told.append(end.code - 128)
        expected = ["what ends a training is done whole", number]
        assert told[-2:] == expected, told
        assert len(told) == (3 if when == "after the last answer" else 2), told

    ended = forked(training_of_two_steps)
    assert ended.code == 0, ended.told


def signal_at(monkeypatch, where: str, number: int, step: int = STEPS) -> None:
    """Have this process get a signal where the training is at that step."""
    module, name = {
        "its step": (loop, "train_step"),
        "its validation": (loop, "validate"),
        "its save": (Saver, "save"),
        "the start": (loop, "fit_memory"),
        "the choice of the final model": (loop, "choose_final"),
    }[where]
    honest = getattr(module, name)

    def signalled(*arguments, **more):
        # (trainer, update, step), (trainer, dev, progress, tracker), (saver, progress)
        progress = arguments[1 if where == "its save" else 2]
        now = step if where == "the choice of the final model" else getattr(progress, "step", progress)
        if where == "the start" or now == step:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), TERM)
        return honest(*arguments, **more)

    monkeypatch.setattr(module, name, signalled)


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize("where", ["its step", "its validation"])
def test_a_signal_in_the_very_last_step_is_answered_and_only_the_choice_of_the_final_model_is_left(
    paths, tmp_path, monkeypatch, caplog, where, number
):
    run = at(paths, tmp_path / "run")
    with monkeypatch.context() as patch, caplog.at_level("INFO"):
        signal_at(patch, where, number)
        with pytest.raises(Preempted, match=f"after step {STEPS}, which is saved") as stopped:
            train_model(settings(), run, ALONE)
    assert stopped.value.exit_code == 128 + number
    assert f"train: {signal.Signals(number).name}; saving and stopping after this step" in caplog.messages
    assert (state(run.run)["state"], state(run.run)["step"]) == ("preempted", STEPS)
    assert not (run.run / "final").exists()
    train_model(settings(), run, ALONE)
    train_model(settings(), at(paths, tmp_path / "whole"), ALONE)
    assert state(run.run) == state(tmp_path / "whole")
    assert equal(final(run.run), final(tmp_path / "whole"))


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize("where", ["its save", "the choice of the final model", "the start"])
def test_a_signal_before_or_after_the_steps_is_neither_lost_nor_spoils_anything(
    paths, tmp_path, monkeypatch, caplog, where, number
):
    run = at(paths, tmp_path / "run")
    with monkeypatch.context() as patch, caplog.at_level("INFO"):
        signal_at(patch, where, number)
        with pytest.raises((KeyboardInterrupt, SystemExit)) as stopped:
            train_model(settings(), run, ALONE)
    assert isinstance(stopped.value, KeyboardInterrupt) if number == INT else stopped.value.code == 143
    assert any("stopped by a signal" in line and "the same command resumes" in line for line in caplog.messages)
    if where != "the start":
        assert (state(run.run)["state"], state(run.run)["step"]) == ("preempted", STEPS)
        assert checkpoint.newest(run.run) == checkpoint.step_folder(run.run, STEPS)
    train_model(settings(), run, ALONE)
    train_model(settings(), at(paths, tmp_path / "whole"), ALONE)
    assert state(run.run) == state(tmp_path / "whole")
    assert equal(final(run.run), final(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("step", [8, STEPS - 1, STEPS])
def test_a_signal_to_any_process_in_any_step_is_answered_by_all(paths, tmp_path, ranks, step):
    run, take_step = at(paths, tmp_path / "run"), loop.train_step

    def process(rank: int) -> None:
        def signalled(trainer, update, number):
            if number == step and rank in ranks:
                os.kill(os.getpid(), TERM)
            return take_step(trainer, update, number)

        loop.train_step = signalled
        try:
            train_here(settings(), run, device="cpu")
        except Preempted as stopped:
            sys.exit(stopped.exit_code)

    told = forked_world(2, process)
    assert [ended.code for ended in told] == [143, 143], told
    assert state(run.run)["state"] == "preempted"
    assert state(run.run)["step"] == min(step + 1, STEPS)
    assert checkpoint.newest(run.run) == checkpoint.step_folder(run.run, min(step + 1, STEPS))
    assert [ended.code for ended in forked_world(2, lambda rank: train_here(settings(), run, device="cpu"))] == [0, 0]
    assert state(run.run)["state"] == "finished"


def test_moments_schedule_patience_best_score_and_charts_go_on(paths, tmp_path):
    config = settings("train.early_stop_patience=50", "runtime.log_every=1", "train.validate_every=2")
    train_model(config, at(paths, tmp_path / "whole"), ALONE)
    run = tmp_path / "cut"
    half = settings(
        "train.early_stop_patience=50", "runtime.log_every=1", "train.validate_every=2", "train.max_steps=10"
    )
    train_model(half, at(paths, run), ALONE)
    train_model(config, at(paths, run), ALONE)
    one, two = (checkpoint.load_optimizer(checkpoint.step_folder(r, STEPS)) for r in (tmp_path / "whole", run))
    assert equal(one, two)
    assert all(float(value) == STEPS for name, value in two.items() if name.endswith(".step"))
    rates = [[row["learning_rate"] for row in metrics(r)] for r in (tmp_path / "whole", run)]
    assert rates[0] == rates[1]
    assert rates[1][STEPS - 1] == pytest.approx(16**-0.5 * min(STEPS**-0.5, STEPS * 10**-1.5))
    ends = [state(r) for r in (tmp_path / "whole", run)]
    assert ends[0] == ends[1]
    assert ends[0]["best_step"]
    assert ends[0]["bad_validations"] == (STEPS - ends[0]["best_step"]) // 2


@pytest.mark.parametrize("lost", ["moments", "step counts"])
def test_a_training_that_lost_its_moments_would_be_noticed(paths, tmp_path, lost):
    """The tests of going on can fail: without the optimizer's state the weights are others."""
    train_model(settings(), at(paths, tmp_path / "whole"), ALONE)
    run = at(paths, tmp_path / "cut")
    train_model(settings("train.max_steps=10"), run, ALONE)
    folder = checkpoint.step_folder(run.run, 10)
    weights, progress = checkpoint.load(folder)
    tensors = checkpoint.load_optimizer(folder)
    for name in tensors:
        if name.endswith(".step") == (lost == "step counts"):
            tensors[name] = torch.zeros_like(tensors[name])
    checkpoint.save(folder, weights, progress, tensors)
    train_model(settings(), run, ALONE)
    assert not equal(final(run.run), final(tmp_path / "whole"))


SETTINGS_OF_THE_RESULT = {
    "optim.learning_rate=0.5": "optim.learning_rate: 0.001 -> 0.5",
    "train.batch_tokens=140": "train.batch_tokens: 150 -> 140",
    "train.seed=2": "train.seed: 1 -> 2",
    "model.dropout=0.3": "model.dropout: 0.2 -> 0.3",
    "bpe.dropout=0.2": "bpe.dropout: 0.0 -> 0.2",
    "train.precision=bfloat16": "train.precision: float32 -> bfloat16",
    "train.keep_checkpoints=5": "train.keep_checkpoints: 3 -> 5",
    "train.save_every=3": "train.save_every: 5 -> 3",
    "train.validate_sentences=2": "train.validate_sentences: 3 -> 2",
}


@pytest.fixture(scope="module")
def trained(paths, tmp_path_factory):
    run = at(paths, tmp_path_factory.mktemp("trained") / "run")
    train_model(settings("train.max_steps=6"), run, ALONE)
    return run


@pytest.mark.parametrize(("change", "told"), SETTINGS_OF_THE_RESULT.items())
def test_another_setting_of_the_result_is_refused_with_old_and_new(trained, change, told):
    with pytest.raises(ConfigError) as refused:
        train_model(settings(change), trained, ALONE)
    assert told in str(refused.value)
    assert refused.value.exit_code == 2
    assert checkpoint.newest(trained.run) == checkpoint.step_folder(trained.run, 6)


@pytest.mark.parametrize("file", ["joint.model", "meta.json"])
def test_another_tokenizer_or_other_data_is_refused(trained, tmp_path, file):
    copies = {name: tmp_path / name for name in ("bpe", "encode")}
    for name, copy in copies.items():
        shutil.copytree(getattr(trained, name), copy)
    changed = next(copy / file for copy in copies.values() if (copy / file).exists())
    changed.write_bytes(changed.read_bytes() + b" ")
    with pytest.raises(ConfigError, match=f"{file} has changed"):
        train_model(settings(), TrainPaths(clean=trained.clean, run=trained.run, **copies), ALONE)


def test_numerics_may_change_and_that_is_logged(trained, tmp_path, caplog):
    run = at(trained, tmp_path / "run")
    shutil.copytree(trained.run, run.run)
    with caplog.at_level("INFO"):
        train_model(settings("runtime.device_tokens=60", "runtime.log_every=3", "train.max_steps=9"), run, ALONE)
    assert "runtime.device_tokens: 40 -> 60" in caplog.text
    assert "log_every" not in caplog.text
    assert checkpoint.newest(run.run) == checkpoint.step_folder(run.run, 9)


DAMAGE = {
    "cut": lambda c: (c / "model.safetensors").write_bytes((c / "model.safetensors").read_bytes()[:100]),
    "flipped": lambda c: flip(c / "optimizer.safetensors"),
    "missing": lambda c: (c / "state.json").unlink(),
    "empty manifest": lambda c: (c / "manifest.json").write_text(""),
}


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 8
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_newest_checkpoint_costs_its_interval_and_no_more(trained, tmp_path, caplog, damage):
    run = at(trained, tmp_path / "run")
    train_model(settings(), run, ALONE)
    whole = final(run.run)
    (run.run / "status.json").unlink()
    damage(checkpoint.newest(run.run))
    train_model(settings(), run, ALONE)
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert "step-00000024" in told[0]
    assert equal(final(run.run), whole)
    for folder in checkpoint.saved_steps(run.run):
        damage(folder)
    (run.run / "status.json").unlink()
    with pytest.raises(CheckpointError, match="--fresh"):
        train_model(settings(), run, ALONE)


def test_two_trainings_never_share_a_folder_and_a_lock_left_behind_is_no_obstacle(paths, tmp_path):
    run = at(paths, tmp_path / "run")
    with run.run.locked(), pytest.raises(ConfigError, match=rf"another training is in .*pid {os.getpid()} on \S+"):
        train_here(settings("train.max_steps=2"), run, device="cpu")
    assert (run.run / "lock").read_text().startswith("pid")  # It is still there, and old.
    train_here(settings("train.max_steps=2"), run, device="cpu")
    assert state(run.run)["state"] == "finished"


@pytest.mark.parametrize("update", [1, 7, 16])
@pytest.mark.parametrize("where", ["prepare", "resample"])
def test_a_training_killed_in_the_thread_that_is_ahead_goes_on_to_the_same_weights(
    paths, tmp_path, monkeypatch, where, update
):
    config, run = settings("bpe.dropout=0.1"), at(paths, tmp_path / "cut")
    train_model(config, at(paths, tmp_path / "whole"), ALONE)
    honest, calls = getattr(loop, where), []

    def killed(*given):
        calls.append(threading.current_thread() is not threading.main_thread())
        # A window is an epoch here, so text is cut anew more seldom than updates are prepared.
        if len(calls) == (update if where == "prepare" else 1 + update // 8):
            if not all(calls):
                os._exit(1)  # Not in the thread.
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(*given)

    with monkeypatch.context() as patch:
        patch.setattr(loop, where, killed)
        _, code = os.waitpid(in_child(config, run), 0)
    assert os.WIFSIGNALED(code)
    train_model(config, run, ALONE)
    assert equal(final(run.run), final(tmp_path / "whole"))
    assert equal(weights(run.run), weights(tmp_path / "whole"))
