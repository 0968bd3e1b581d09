"""`nmt average`: it never takes a better model away, it can be taken back, and the pipeline stays of one mind."""

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from forked import nmt
from nmt import config
from nmt.data.batching import collate
from nmt.data.dataset import open_dataset
from nmt.errors import CheckpointError, ConfigError, DataError
from nmt.pipeline import engine, stages
from nmt.runs import checkpoint
from nmt.runs.run_dir import RunDir
from nmt.special_tokens import PAD
from nmt.training import averaging
from nmt.training.averaging import average_checkpoints, restore_final
from nmt.training.loop import train_model
from tiny import ALONE, at, equal, final, settings

RUN = "runs/tiny.en-zh"


@pytest.fixture(scope="module")
def trained(paths, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("averaging") / "run"
    train_model(settings("train.early_stop_metric=loss", "model.dropout=0"), at(paths, run), ALONE)
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def dev_score(paths, weights: dict[str, torch.Tensor]) -> float:
    """Minus the label-smoothed loss of the dev set in one batch, by torch's own cross-entropy."""
    data = open_dataset(paths.encode, "dev", "en", "zh")
    batch = collate(*data.take(np.arange(len(data))))
    model = checkpoint.build_model(settings("model.dropout=0"), weights)
    with torch.no_grad():
        scores = model.logits(model(batch.src, batch.tgt_in))
    return -F.cross_entropy(scores.flatten(0, 1), batch.tgt_out.flatten(), label_smoothing=0.1, ignore_index=PAD).item()


def spoil_final(run: Path) -> None:
    """Put a worse model in the place of the final one."""
    weights, state = checkpoint.load(run / "final")
    checkpoint.save(run / "final", {name: tensor * 1.5 for name, tensor in weights.items()}, state)


def mean_of(run: Path, last: int) -> dict[str, torch.Tensor]:
    kept = [checkpoint.load(folder)[0] for folder in checkpoint.saved_steps(run)[-last:]]
    return {
        name: sum(one[name].double() for one in kept).div(last).to(tensor.dtype) for name, tensor in kept[0].items()
    }


@pytest.mark.parametrize("last", [1, 2, 3])
def test_an_average_that_is_not_better_is_put_beside_and_the_final_model_stays(run, paths, last):
    # The training took the best of its weights already, or those very ones.
    before = files(run / "final")
    found = average_checkpoints(RunDir(run), last, None, "cpu", force=False)
    assert files(run / "final") == before
    assert not RunDir(run).former_final.exists()
    assert found.folder == run / "average"
    assert equal(checkpoint.load(run / "average")[0], mean_of(run, last))
    assert found.scores[f"average of {last}"] == pytest.approx(dev_score(paths, mean_of(run, last)), abs=1e-5)
    assert found.scores["final"] == pytest.approx(dev_score(paths, final(run)), abs=1e-5)
    assert found.scores[f"average of {last}"] <= found.scores["final"]
    assert found.measure == "minus the loss"


@pytest.mark.parametrize("last", [1, 2, 3])
def test_an_average_that_is_better_becomes_final_and_the_former_one_can_be_brought_back(run, last):
    spoil_final(run)
    before = files(run / "final")
    found = average_checkpoints(RunDir(run), last, None, "cpu", force=False)
    assert found.folder == run / "final"
    assert found.scores[f"average of {last}"] > found.scores["final"]
    assert equal(final(run), mean_of(run, last))
    state = json.loads((run / "final/state.json").read_text())
    assert state["made_of"] == f"average of {last} (nmt average)"
    assert state["dev_scores"] == found.scores
    assert files(RunDir(run).former_final) == before
    restore_final(RunDir(run))
    assert files(run / "final") == before
    assert not RunDir(run).former_final.exists()
    with pytest.raises(CheckpointError, match="has no final-before"):
        restore_final(RunDir(run))


def test_with_force_nothing_is_compared_and_the_former_model_is_still_kept(run, monkeypatch):
    monkeypatch.setattr(averaging, "_on_dev", lambda *_: pytest.fail("it was compared"))
    before = files(run / "final")
    found = average_checkpoints(RunDir(run), 2, None, "cpu", force=True)
    assert (found.folder, found.scores) == (run / "final", {})
    assert equal(final(run), mean_of(run, 2))
    assert files(RunDir(run).former_final) == before


def test_after_several_averages_the_way_back_is_to_what_the_training_made(run):
    made = files(run / "final")
    for last in (1, 2, 3):
        assert average_checkpoints(RunDir(run), last, None, "cpu", force=True).former
        assert files(RunDir(run).former_final) == made
    restore_final(RunDir(run))
    assert files(run / "final") == made


def test_what_a_longer_training_has_chosen_since_is_what_is_kept(run, paths):
    average_checkpoints(RunDir(run), 1, None, "cpu", force=True)
    train_model(
        settings("train.early_stop_metric=loss", "model.dropout=0", "train.max_steps=26"), at(paths, run), ALONE
    )
    made = files(run / "final")
    average_checkpoints(RunDir(run), 2, None, "cpu", force=True)
    assert files(RunDir(run).former_final) == made


@pytest.mark.parametrize("state", ["missing", "corrupt"])
def test_a_run_without_a_final_model_gets_one(run, state):
    if state == "missing":
        shutil.rmtree(run / "final")
    else:
        (run / "final/model.safetensors").write_bytes(b"cut")
    found = average_checkpoints(RunDir(run), 3, None, "cpu", force=False)
    assert (found.folder, found.scores) == (run / "final", {})
    assert equal(final(run), mean_of(run, 3))
    assert not found.former
    assert not RunDir(run).former_final.exists()


def test_into_a_folder_of_ones_own_nothing_is_compared_and_the_run_is_left_alone(run, tmp_path):
    before = files(run / "final")
    found = average_checkpoints(RunDir(run), 2, tmp_path / "mine", "cpu", force=False)
    assert found.folder == tmp_path / "mine"
    assert equal(checkpoint.load(tmp_path / "mine")[0], mean_of(run, 2))
    assert files(run / "final") == before


@pytest.mark.parametrize("lost", ["folder", "other data", "no provenance"])
def test_without_the_dev_set_of_the_training_nothing_is_replaced_and_the_ways_on_are_named(run, paths, lost, tmp_path):
    facts = json.loads((run / "provenance.json").read_text())
    if lost == "folder":
        facts["encode"] = str(tmp_path / "nowhere")
    elif lost == "other data":
        shutil.copytree(paths.encode, tmp_path / "encode")
        (tmp_path / "encode/meta.json").write_text((paths.encode / "meta.json").read_text() + " ")
        facts["encode"] = str(tmp_path / "encode")
    else:
        facts = {}
    (run / "provenance.json").write_text(json.dumps(facts))
    spoil_final(run)
    before = files(run / "final")
    with pytest.raises(DataError, match="--force"):
        average_checkpoints(RunDir(run), 2, None, "cpu", force=False)
    assert files(run / "final") == before
    assert average_checkpoints(RunDir(run), 2, None, "cpu", force=True).folder == run / "final"


def test_bleu_is_compared_where_the_training_chose_by_bleu(run, monkeypatch):
    wanted = settings("train.early_stop_metric=bleu", "model.dropout=0")
    monkeypatch.setattr(averaging, "read_config", lambda _: wanted)
    monkeypatch.setattr(averaging, "unchanged", lambda *_: True)
    assert average_checkpoints(RunDir(run), 2, None, "cpu", force=False).measure == "BLEU"
    quiet = replace(wanted, train=replace(wanted.train, validate_sentences=0))
    monkeypatch.setattr(averaging, "read_config", lambda _: quiet)
    assert average_checkpoints(RunDir(run), 2, None, "cpu", force=False).measure == "minus the loss"


def test_a_training_that_starts_over_leaves_no_model_of_the_one_before(run, paths):
    spoil_final(run)
    average_checkpoints(RunDir(run), 2, None, "cpu", force=False)
    average_checkpoints(RunDir(run), 1, None, "cpu", force=False)
    assert RunDir(run).former_final.exists()
    assert RunDir(run).average.exists()
    train_model(settings("train.max_steps=5"), at(paths, run), ALONE, fresh=True)
    assert not RunDir(run).former_final.exists()
    assert not RunDir(run).average.exists()


# ── as a command ────────────────────────────────────────────────────────────────────────────────────────────────────


def words(folder: Path) -> dict[str, str]:
    with contextlib.chdir(folder):
        return {state.stage.name: state.word for state in engine.status(stages.build_stages(config.load("tiny.yaml")))}


@pytest.fixture
def folder(pipeline_run, tmp_path) -> Path:
    return Path(shutil.copytree(pipeline_run, tmp_path / "walked"))


def test_after_an_average_the_training_is_up_to_date_and_what_uses_the_model_is_not(folder):
    assert set(words(folder).values()) == {"up_to_date"}
    ended = nmt(folder, "average", RUN, "--last", "1", "--force")
    assert ended.code == 0, ended.told
    assert f"{RUN}/final-before" in ended.told
    assert words(folder) == {"clean": "up_to_date", "bpe": "up_to_date", "encode": "up_to_date", "train": "up_to_date",
                             "translate": "out_of_date", "eval": "blocked"}  # fmt: skip
    ended = nmt(folder, "run", "-c", "tiny.yaml")
    assert "finished; nothing to do" not in ended.told
    assert set(words(folder).values()) == {"up_to_date"}
    ended = nmt(folder, "average", RUN, "--restore")
    assert "is the former one again" in ended.told
    assert words(folder)["train"] == "up_to_date"
    assert words(folder)["translate"] == "out_of_date"


def test_an_average_that_stays_beside_leaves_every_stage_up_to_date(folder):
    ended = nmt(folder, "average", RUN, "--last", "1", "--device", "cpu")
    assert ended.code == 0, ended.told
    told = ended.told.split("\n")
    if "the final model stays" in ended.told:
        assert set(words(folder).values()) == {"up_to_date"}
        assert f"{RUN}/average" in told[-2]
    assert "on the whole dev set: average of 1 has " in told[0]


def test_a_run_whose_final_model_was_changed_otherwise_stays_out_of_date(folder):
    with (folder / RUN / "final/state.json").open("a") as stream:
        stream.write(" ")
    assert words(folder)["train"] == "out_of_date"
    nmt(folder, "average", RUN, "-o", "elsewhere")
    assert words(folder)["train"] == "out_of_date"


def test_no_average_is_made_while_a_training_is_in_the_run(folder):
    with RunDir(folder / RUN).locked():
        ended = nmt(folder, "average", RUN, "--force")
    assert ended.code == 2
    assert "another training is in" in ended.told


def test_what_is_no_run_is_left_without_a_lock(folder):
    (folder / "runs/none").mkdir()
    for name in ("runs/none", "runs/never"):
        ended = nmt(folder, "average", name)
        assert ended.code == 1
        assert "is no run folder" in ended.told
    assert list((folder / "runs/none").iterdir()) == []
    assert not (folder / "runs/never").exists()


@pytest.mark.parametrize("name", [".", "..", "kept", "run", "run/final", "run/checkpoints", "link", "file"])
def test_an_average_is_never_put_in_the_place_of_something_else(run, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="exists"):
        average_checkpoints(RunDir(run), 2, Path(name), "cpu", force=False)
    assert sorted(tmp_path.rglob("*")) == before
    assert average_checkpoints(RunDir(run), 2, Path("new"), "cpu", force=False).folder == Path("new")


def test_a_training_that_goes_on_leaves_no_way_back_to_the_final_model_before_it(run, paths):
    average_checkpoints(RunDir(run), 1, None, "cpu", force=True)
    RunDir(run).average.mkdir()
    train_model(
        settings("train.early_stop_metric=loss", "model.dropout=0", "train.max_steps=30"), at(paths, run), ALONE
    )
    assert json.loads((run / "final/state.json").read_text())["step"] == 30
    assert not RunDir(run).average.exists()
    with pytest.raises(CheckpointError, match="has no final-before"):
        restore_final(RunDir(run))
