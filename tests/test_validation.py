"""The dev set's scores, which of them is the best, and the weights that a training ends with."""

import json
import math
import shutil
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nmt.config import TranslateConfig
from nmt.data.dataset import open_dataset
from nmt.data.tokenizer import load_tokenizers
from nmt.decoding.translator import Translator
from nmt.errors import DataError, NmtError
from nmt.runs import checkpoint
from nmt.runs.run_dir import RunDir
from nmt.training import validation
from nmt.training.step import Trainer, dev_loss, prepare, train_step
from nmt.training.validation import DevSet, Progress, choose_final, translate_dev, validate
from tiny import ALONE, settings


class Notes:
    """A tracker that keeps what it is given."""

    def __init__(self):
        self.scores, self.shown, self.said = [], [], []

    def log_scalars(self, kind, step, values):
        self.scores.append((kind, step, dict(values)))

    def log_translations(self, step, rows):
        self.shown.append((step, rows))

    def say(self, text):
        self.said.append(text)


@pytest.fixture(scope="module")
def dev(paths) -> DevSet:
    return DevSet.load(settings(), paths, load_tokenizers(paths.bpe, "en", "zh"))


def test_the_dev_set_must_be_what_was_encoded_unless_another_process_has_looked(paths, tmp_path):
    shutil.copytree(paths.encode, tmp_path / "encode")
    changed, tokenizers = replace(paths, encode=tmp_path / "encode"), load_tokenizers(paths.bpe, "en", "zh")
    ids = np.fromfile(tmp_path / "encode/dev.zh.ids", dtype=np.uint16)
    ids[0] += 1
    ids.tofile(tmp_path / "encode/dev.zh.ids")
    with pytest.raises(DataError, match=r"dev.zh.ids is not what was written"):
        DevSet.load(settings(), changed, tokenizers)
    assert len(DevSet.load(settings(), changed, tokenizers, verify=False).data) == 9


@pytest.fixture(scope="module")
def weights_by_age(paths) -> dict[int, dict[str, torch.Tensor]]:
    """The weights after so many steps of one training."""
    trainer = Trainer.build(settings("optim.lr_factor=4", "model.dropout=0.3"), ALONE, (340, 340))
    data, kept = open_dataset(paths.encode, "train", "en", "zh"), {}
    for step in range(1, 21):
        train_step(trainer, prepare(trainer, data, np.random.default_rng(step).permutation(150)[:40]), step)
        if step in (1, 18, 19, 20):
            kept[step] = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    return kept


def trainer_with(weights, *changes: str) -> Trainer:
    trainer = Trainer.build(settings(*changes), ALONE, (340, 340))
    trainer.model.load_state_dict(weights)
    return trainer


@pytest.mark.parametrize("sentences", [1, 4, 9, 100])
def test_the_first_sentences_of_the_dev_set_are_translated_without_dropout_and_scored(
    dev, weights_by_age, monkeypatch, sentences
):
    asked = []
    monkeypatch.setattr(validation, "bleu", lambda *texts: asked.append(texts) or SimpleNamespace(value=12.5))
    trainer = trainer_with(weights_by_age[1], "model.dropout=0.5", "translate.beam=3", "translate.max_length_offset=1")
    trainer.model.train()
    score, hyps = translate_dev(trainer, dev, sentences)
    assert trainer.model.training
    trainer.model.eval()
    greedy = replace(trainer.config, translate=TranslateConfig(beam=1))  # what is set for `translate` decides nothing
    expected = Translator(trainer.model, *dev.tokenizers, dev.normaliser, greedy).translate(dev.src)
    assert len(set(expected)) > 3
    assert hyps == expected[:sentences]
    assert score == 12.5
    assert asked == [(hyps, [[ref] for ref in dev.tgt[:sentences]], "zh")]


def test_two_processes_translate_a_share_each_and_both_know_all(dev, weights_by_age):
    trainer, told = trainer_with(weights_by_age[1], "translate.batch_tokens=40"), {}
    alone = translate_dev(trainer, dev, 9)
    for _ in ("what each has to say", "and what each hears"):
        found = []
        for rank in (0, 1):
            world = SimpleNamespace(rank=rank, size=2, device=ALONE.device, is_main=rank == 0, broadcast=list)
            world.gather = lambda data, rank=rank: told.update({rank: data}) or [told.get(r, b"[]") for r in (0, 1)]
            try:
                found.append(translate_dev(replace(trainer, world=world), dev, 9))
            except Exception:
                assert len(told) < 2, "not even now"
    assert [hyps for _, hyps in found] == [alone[1], alone[1]]
    assert [score for score, _ in found] == [alone[0], 0.0], "the first one scores for all"
    tasks = [[number for number, _ in json.loads(told[rank])] for rank in (0, 1)]
    assert tasks[0]
    assert not set(tasks[0]) & set(tasks[1])


def test_a_new_training_has_done_nothing():
    assert not any(asdict(Progress()).values())


@pytest.fixture
def measured(monkeypatch):
    """Sets what the dev set gives: (loss, nll), BLEU."""

    def give(losses: tuple[float, float], score: float = 0.0) -> None:
        def loss(trainer, data):
            assert (type(trainer), len(data)) == (Trainer, 9)
            return losses

        def translate(trainer, dev, sentences):
            assert (type(trainer), type(dev)) == (Trainer, DevSet)
            return score, [f"hyp {i}" for i in range(sentences)]

        monkeypatch.setattr(validation, "dev_loss", loss)
        monkeypatch.setattr(validation, "translate_dev", translate)

    return give


@pytest.mark.parametrize(
    ("changes", "losses", "score", "expected"),
    [
        ((), (3.0, 2.0), 12.0, 12.0),
        (("train.early_stop_metric=loss",), (3.0, 2.0), 12.0, -3.0),
        (("train.validate_sentences=0",), (3.0, 2.0), 12.0, -3.0),
        (("train.validate_sentences=0", "train.early_stop_metric=loss"), (3.0, 2.0), 12.0, -3.0),
    ],
)
def test_the_score_is_bleu_or_minus_the_loss(dev, weights_by_age, measured, changes, losses, score, expected):
    trainer, notes = trainer_with(weights_by_age[1], *changes), Notes()
    measured(losses, score)
    progress = validate(trainer, dev, Progress(step=7), notes)
    assert progress == Progress(step=7, best_score=expected, best_step=7, bad_validations=0)
    ((kind, step, values),) = notes.scores
    assert (kind, step, values["loss"], values["nll"]) == ("dev", 7, 3.0, 2.0)
    assert values["ppl"] == pytest.approx(math.exp(2))
    assert 0 <= values["seconds"] < 20
    translated = trainer.config.train.validate_sentences
    assert values.get("bleu") == (score if translated else None)
    assert values.get("sentences") == (translated or None)
    assert notes.shown == ([(7, [(dev.src[i], dev.tgt[i], f"hyp {i}") for i in range(3)])] if translated else [])


def test_a_few_translations_are_shown_and_a_loss_beyond_all_numbers_has_a_perplexity(dev, weights_by_age, measured):
    trainer, notes = trainer_with(weights_by_age[1], "train.validate_sentences=9"), Notes()
    measured((1e4, 1e4))
    validate(trainer, dev, Progress(step=1), notes)
    assert len(notes.shown[0][1]) == 5
    assert notes.scores[0][2]["ppl"] == pytest.approx(math.exp(20))


def test_only_a_higher_score_is_better_and_the_others_are_counted(dev, weights_by_age, measured):
    trainer = trainer_with(weights_by_age[1])
    progress, course = Progress(epoch=3), []
    for step, score in enumerate((0.0, 5.0, 5.0, 4.0, 6.0, 5.9), 1):
        measured((1.0, 1.0), score)
        progress = validate(trainer, dev, replace(progress, step=step), Notes())
        course.append((progress.best_score, progress.best_step, progress.bad_validations))
    assert course == [(0, 1, 0), (5, 2, 0), (5, 2, 1), (5, 2, 2), (6, 5, 0), (6, 5, 1)]
    assert progress.epoch == 3


# ── the final model ─────────────────────────────────────────────────────────────────────────────────────────────────


def saved(folder, weights_by_age, steps, best=None):
    run = RunDir(folder)
    for step in steps:
        checkpoint.save(checkpoint.step_folder(run, step), weights_by_age[step], {"step": step})
    if best is not None:
        checkpoint.save(run / "best", weights_by_age[best], {"step": best})
    return run


def mean_of(weights_by_age, steps):
    return {
        name: torch.stack([weights_by_age[step][name].double() for step in steps]).mean(0).float()
        for name in weights_by_age[1]
    }


def close(one, two):
    return one.keys() == two.keys() and all(torch.allclose(one[name], two[name], atol=1e-6) for name in one)


@pytest.mark.parametrize(
    ("steps", "best", "made_of"),
    [
        ((1,), 20, "best (step 20)"),
        ((18, 19, 20), 1, "average of 3"),
        ((18, 20), None, "average of 2"),
        ((), 1, "best (step 20)"),
    ],
)
@pytest.mark.parametrize("change", ["train.early_stop_metric=loss", "train.validate_sentences=0"])
def test_the_final_model_has_the_lower_loss_on_the_dev_set(dev, weights_by_age, tmp_path, steps, best, made_of, change):
    run, notes = saved(tmp_path, weights_by_age, steps, best), Notes()
    trainer = trainer_with(weights_by_age[1], change)
    choose_final(trainer, run, dev, Progress(step=20, best_step=20), notes)
    weights, state = checkpoint.load(run / "final")
    expected = mean_of(weights_by_age, steps) if "average" in made_of else weights_by_age[best]
    assert close(weights, expected)
    assert (state["made_of"], state["step"]) == (made_of, 20)
    assert state["dev_scores"][made_of] == max(state["dev_scores"].values())
    assert len(state["dev_scores"]) == bool(steps) + (best is not None)
    trainer.model.load_state_dict(expected)
    assert state["dev_scores"][made_of] == pytest.approx(-dev_loss(trainer, dev.data)[0], rel=1e-5)
    assert f"{state['dev_scores'][made_of]:.2f}" in notes.said[0]
    assert "minus the loss on the whole dev set" in notes.said[0]


@pytest.mark.parametrize(("average", "best"), [(3.0, 4.0), (4.0, 3.0), (3.0, 3.0)])
def test_the_final_model_has_the_higher_bleu_on_the_whole_dev_set(
    dev, weights_by_age, tmp_path, monkeypatch, average, best
):
    run, sentences = saved(tmp_path, weights_by_age, (18, 19), 20), []

    def scored(trainer, dev, n):
        sentences.append(n)
        averaged = close(trainer.model.state_dict(), mean_of(weights_by_age, (18, 19)))
        return (average if averaged else best), []

    monkeypatch.setattr(validation, "translate_dev", scored)
    notes = Notes()
    choose_final(trainer_with(weights_by_age[1]), run, dev, Progress(step=20, best_step=1_234), notes)
    expected = f"BLEU on the whole dev set: average of 2 has {average:.2f}, best (step 1,234) has {best:.2f}; final is"
    assert expected in notes.said[0]
    weights, state = checkpoint.load(run / "final")
    assert sentences == [9, 9]
    assert state["dev_scores"] == {"average of 2": average, "best (step 1,234)": best}
    wins = "average of 2" if average >= best else "best (step 1,234)"
    assert state["made_of"] == wins
    assert close(weights, mean_of(weights_by_age, (18, 19)) if average >= best else weights_by_age[20])


def test_a_damaged_checkpoint_is_not_averaged_and_without_any_there_is_no_final_model(dev, weights_by_age, tmp_path):
    run = saved(tmp_path, weights_by_age, (18, 19, 20), 1)
    for folder in (checkpoint.step_folder(run, 19), run / "best"):
        (folder / "model.safetensors").write_bytes(b"cut")
    trainer = trainer_with(weights_by_age[1], "train.validate_sentences=0")
    choose_final(trainer, run, dev, Progress(step=20), Notes())
    weights, state = checkpoint.load(run / "final")
    assert list(state["dev_scores"]) == ["average of 2"]
    assert close(weights, mean_of(weights_by_age, (18, 20)))
    for folder in checkpoint.saved_steps(run):
        (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(NmtError, match=r"no checkpoint in .* is whole"):
        choose_final(trainer, run, dev, Progress(step=20), Notes())


def test_averages_by_hand_of_an_earlier_final_model_go_with_it(dev, weights_by_age, tmp_path):
    run = saved(tmp_path, weights_by_age, (18, 19), 20)
    for folder in (run.average, run.former_final):
        checkpoint.save(folder, weights_by_age[1], {})
    choose_final(trainer_with(weights_by_age[1], "train.validate_sentences=0"), run, dev, Progress(step=20), Notes())
    assert sorted(path.name for path in run.iterdir()) == ["best", "checkpoints", "final"]


def test_the_leader_alone_writes_the_final_model_and_all_wait_for_it(dev, weights_by_age, tmp_path):
    run = saved(tmp_path, weights_by_age, (18, 19), 20)
    waits = []
    for is_main in (False, True):
        world = SimpleNamespace(
            rank=int(not is_main), size=1, device=ALONE.device, is_main=is_main, sum=list, gather=None
        )
        world.broadcast, world.barrier = list, lambda: waits.append((run / "final").exists())
        world.all_or_none, world.spread = nullcontext, list
        trainer = replace(trainer_with(weights_by_age[1], "train.validate_sentences=0"), world=world)
        choose_final(trainer, run, dev, Progress(step=20), Notes())
    assert waits == [False, True]


def test_results_travel_between_processes_as_they_are():
    told = []
    world = SimpleNamespace(rank=1, size=2, gather=lambda data: told.append(json.loads(data)) or [b"[[0, [1]]]", data])
    assert list(validation.share_among(world, 3, lambda task: [task, "猫"])) == [(0, [1]), (1, [1, "猫"])] or told
    assert told == [[[1, [1, "猫"]]]]
