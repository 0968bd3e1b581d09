"""A training that is killed, asked to end, or given other processes goes on as if nothing had been."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from nmt import checkpoint, training, watch
from nmt.config import Config
from nmt.errors import CheckpointError, ConfigError, Preempted
from nmt.provenance import TrainPaths, lock
from nmt.stages import train_here
from nmt.training import train_model
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
    config = settings("optim.max_steps=60", "train.log_every=1", "train.save_every=4", "bpe.dropout=0.1")
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
            assert max(seen, default=0) - saved <= 4, "more work was lost than one save interval"
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
    take_step = training.train_step

    def signalled(trainer, data, update, step):
        if step == 8:
            os.kill(os.getpid(), number)
        return take_step(trainer, data, update, step)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(training, "train_step", signalled)
        with pytest.raises(Preempted, match="after step 8, which is saved") as stopped:
            train_model(config, at(paths, run), ALONE)
    assert stopped.value.exit_code == 128 + number
    assert signal.getsignal(number) == before
    assert (state(run)["state"], state(run)["step"]) == ("preempted", 8)
    assert checkpoint.newest(run) == checkpoint.step_folder(run, 8)
    train_model(config, at(paths, run), ALONE)
    train_model(config, at(paths, tmp_path / "whole"), ALONE)
    assert equal(final(run), final(tmp_path / "whole"))


def test_a_second_signal_ends_the_process_at_once(paths, tmp_path):
    child = os.fork()
    if child == 0:
        with watch.Stop(ALONE) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            if stop.agreed() == signal.SIGINT:  # The first one is only noted.
                os.kill(os.getpid(), signal.SIGINT)
            os._exit(0)
    _, code = os.waitpid(child, 0)
    assert os.WIFSIGNALED(code)
    assert os.WTERMSIG(code) == signal.SIGINT


def test_moments_schedule_patience_best_score_and_charts_go_on(paths, tmp_path):
    config = settings("optim.patience=50", "train.log_every=1", "train.validate_every=2")
    train_model(config, at(paths, tmp_path / "whole"), ALONE)
    run = tmp_path / "cut"
    half = settings("optim.patience=50", "train.log_every=1", "train.validate_every=2", "optim.max_steps=10")
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
    assert ends[0]["worse"] == (STEPS - ends[0]["best_step"]) // 2


@pytest.mark.parametrize("lost", ["moments", "step counts"])
def test_a_training_that_lost_its_moments_would_be_noticed(paths, tmp_path, lost):
    """The tests of going on can fail: without the optimizer's state the weights are others."""
    train_model(settings(), at(paths, tmp_path / "whole"), ALONE)
    run = at(paths, tmp_path / "cut")
    train_model(settings("optim.max_steps=10"), run, ALONE)
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
    "optim.batch_tokens=140": "optim.batch_tokens: 150 -> 140",
    "optim.seed=2": "optim.seed: 1 -> 2",
    "model.dropout=0.3": "model.dropout: 0.2 -> 0.3",
    "bpe.dropout=0.2": "bpe.dropout: 0.0 -> 0.2",
    "optim.precision=bfloat16": "optim.precision: float32 -> bfloat16",
    "train.keep=5": "train.keep: 3 -> 5",
    "train.save_every=3": "train.save_every: 5 -> 3",
    "train.validate_sentences=2": "train.validate_sentences: 3 -> 2",
}


@pytest.fixture(scope="module")
def trained(paths, tmp_path_factory):
    run = at(paths, tmp_path_factory.mktemp("trained") / "run")
    train_model(settings("optim.max_steps=6"), run, ALONE)
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
        train_model(settings("train.device_tokens=60", "train.log_every=3", "optim.max_steps=9"), run, ALONE)
    assert "train.device_tokens: 40 -> 60" in caplog.text
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
    with lock(run.run), pytest.raises(ConfigError, match=rf"another training is in .*pid {os.getpid()} on \S+"):
        train_here(settings("optim.max_steps=2"), run, device="cpu")
    assert (run.run / "lock").read_text().startswith("pid")  # It is still there, and old.
    train_here(settings("optim.max_steps=2"), run, device="cpu")
    assert state(run.run)["state"] == "finished"
