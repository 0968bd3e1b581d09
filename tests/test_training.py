"""Training: one update however it is cut, going on to the same weights, and what a run folder holds."""

import dataclasses
import json
import logging
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from nmt.config import BpeConfig, Config, EncodeConfig, load
from nmt.data.batching import collate, plan_epoch
from nmt.data.dataset import encode_corpus, open_dataset
from nmt.data.train_tokenizer import train_bpe
from nmt.decoding.translator import Translator
from nmt.distributed import host
from nmt.distributed.world import World
from nmt.errors import CheckpointError, ConfigError
from nmt.model.flops import parameters
from nmt.runs import checkpoint
from nmt.runs.identity import TrainPaths
from nmt.runs.run_dir import read_config
from nmt.special_tokens import PAD
from nmt.training import loop, validation
from nmt.training.loop import train_model
from nmt.training.saver import Saver
from nmt.training.step import StepStats, Trainer, TrainingModel, micro_batches, prepare, train_step
from nmt.training.validation import Progress
from tiny import ALONE, at, equal, losses, metrics, settings, weights


def trainer_of(config: Config, dtype: torch.dtype = torch.float64) -> Trainer:
    trainer = Trainer.build(config, ALONE, (340, 340))
    trainer.model.to(dtype)
    return trainer


def test_an_update_is_the_mean_over_its_target_tokens_however_it_is_cut(paths):
    data = open_dataset(paths.encode, "train", "en", "zh")
    update = np.arange(40)
    reference = trainer_of(settings("model.dropout=0"))
    batch = collate(*data.take(update))
    scores = reference.model.logits(reference.model(batch.src, batch.tgt_in))
    loss = F.cross_entropy(scores.flatten(0, 1), batch.tgt_out.flatten(), label_smoothing=0.1, ignore_index=PAD)
    loss.backward()
    for device_tokens in (12, 40, 5000):
        trainer = trainer_of(settings("model.dropout=0", f"runtime.device_tokens={device_tokens}", "optim.clip_norm=0"))
        stats = train_step(trainer, prepare(trainer, data, update), 1)
        assert stats.loss.item() / stats.tgt_tokens == pytest.approx(loss.item(), abs=1e-9)
        for ours, theirs in zip(trainer.model.parameters(), reference.model.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, atol=1e-10)


def test_loss_and_gradient_do_not_see_padding(paths):
    data = open_dataset(paths.encode, "train", "en", "zh")
    model = TrainingModel(trainer_of(settings("model.dropout=0")).model, 0.1)
    batch = collate(*data.take(np.arange(20)))
    found = []
    for extra in (0, 5):
        model.zero_grad()
        src, tgt_in, tgt_out = (F.pad(ids, (0, extra)) for ids in (batch.src, batch.tgt_in, batch.tgt_out))
        loss, nll = model(src, tgt_in, tgt_out, torch.nonzero(tgt_out.flatten()).squeeze(1))
        loss.backward()
        found.append((loss.item(), nll.item(), [p.grad.clone() for p in model.parameters()]))
    assert found[0][:2] == pytest.approx(found[1][:2])
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(found[0][2], found[1][2], strict=True))


def test_clipping_bounds_the_gradient_and_zero_leaves_it(paths):
    data = open_dataset(paths.encode, "train", "en", "zh")

    def norm_after(clip: str) -> tuple[float, float]:
        trainer = trainer_of(settings(f"optim.clip_norm={clip}"))
        stats = train_step(trainer, prepare(trainer, data, np.arange(20)), 1)
        after = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm()
        return stats.grad_norm.item(), after.item()

    before, after = norm_after("0.01")
    assert before > 0.01
    assert after == pytest.approx(0.01, rel=1e-3)
    assert norm_after("0") == pytest.approx((before, before))


@pytest.mark.parametrize("recipe", sorted(path.name for path in Path("configs").glob("*.yaml")))
def test_the_first_update_of_every_recipe_runs(paths, recipe):
    # Shrunk in size; compiling is tested once, below.
    small = (
        "runtime.compile=false",
        "model.layers=1",
        "model.d_model=16",
        "model.d_ff=16",
        "model.heads=2",
        "train.batch_tokens=100",
    )
    trainer = Trainer.build(load(recipe, small), ALONE, (340, 340))
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    data = open_dataset(paths.encode, "train", "en", "zh")
    stats = train_step(trainer, prepare(trainer, data, np.arange(10)), 1)
    assert 0 < stats.loss.item() / stats.tgt_tokens < 2 * np.log(340)
    assert stats.rate > 0
    changed = [name for name, weight in trainer.model.state_dict().items() if not torch.equal(weight, before[name])]
    assert "embedding.weight" in changed


def test_dropout_draws_new_masks_in_each_step_and_micro_batch_and_the_same_when_a_step_is_taken_again(paths):
    data = open_dataset(paths.encode, "train", "en", "zh")

    def loss(step: int, update: list[int], *changes: str) -> float:
        trainer = trainer_of(settings("train.seed=3", *changes))  # With the same weights each time.
        return train_step(trainer, prepare(trainer, data, np.array(update)), step).loss.item()

    plain = [loss(step, [5], "model.dropout=0") for step in (1, 2, 3)]
    assert len(set(plain)) == 1
    for change in ("model.dropout=0.3", "model.attention_dropout=0.3", "model.activation_dropout=0.3"):
        rest = () if change.startswith("model.dropout") else ("model.dropout=0",)
        drawn = [loss(step, [5], change, *rest) for step in range(1, 9)]
        assert len(set(drawn)) == len(drawn), "two steps have the same masks"
        assert [loss(step, [5], change, *rest) for step in range(1, 9)] == drawn
    # The same pair in two micro-batches of an update: the second does not repeat the first.
    apart = ("model.dropout=0.3", f"runtime.device_tokens={int(max(data.src.lengths[5], data.tgt.lengths[5]))}")
    assert len(step_parts := list(micro_batches(trainer_of(settings(*apart)), data, np.array([5, 5])))) == 2, step_parts
    assert loss(1, [5, 5], *apart) != pytest.approx(2 * loss(1, [5], *apart), rel=1e-9)
    still = ("model.dropout=0", apart[1])
    assert loss(1, [5, 5], *still) == pytest.approx(2 * loss(1, [5], *still), rel=1e-9)


class Clock:
    """Time that passes where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def __getattr__(self, name: str):
        return getattr(time, name)


def tokens_of(step: int) -> int:
    return 100 + step * step % 37


def seconds_of(step: int) -> float:
    return 0.25 + step % 5


def clocked(monkeypatch, breaks_at: int = 0) -> None:
    """Steps of known tokens, operations and seconds, and pauses of hours; nothing is computed."""
    clock, honest = Clock(), Saver.save

    def take_step(trainer, update, step):
        if step == breaks_at:
            raise KeyboardInterrupt
        clock.now += seconds_of(step)
        number = torch.tensor(float(step))
        seconds = {"data": 0.0}
        return StepStats(number, number, number, torch.tensor(0.0), 0.1, 1, tokens_of(step), 7.0 * step, 0.0, seconds)

    def look(trainer, dev, progress, tracker):
        clock.now += 3600 + progress.step
        return dataclasses.replace(progress, best_step=progress.step)

    def save(*arguments, **more):
        clock.now += 600
        honest(*arguments, **more)

    class Meter(loop.Meter):
        def __init__(self, world, precision):
            super().__init__(world, precision)
            self.peak = 1e4

    for name, fake in {"time": clock, "train_step": take_step, "validate": look, "Meter": Meter}.items():
        monkeypatch.setattr(loop, name, fake)
    monkeypatch.setattr(Saver, "save", save)
    moments = lambda _, model: {name: tensor.clone() for name, tensor in checkpoint._moments(model).items()}  # noqa: E731
    monkeypatch.setattr(checkpoint, "optimizer_tensors", moments)
    monkeypatch.setattr(loop, "choose_final", lambda *_: None)


def check_rates(rows: list[dict], begun: int) -> None:
    """Each row is over the steps after the row before, or after `begun`, and over their time alone."""
    for row in rows:
        steps = range(begun + 1, row["step"] + 1)
        seconds = sum(map(seconds_of, steps))
        assert row["steps"] == len(steps)
        assert row["tokens_per_second"] == pytest.approx(sum(map(tokens_of, steps)) / seconds, rel=1e-9)
        assert row["mfu"] == pytest.approx(sum(7.0 * step for step in steps) / seconds / 1e4, rel=1e-9)
        assert row["loss"] == pytest.approx(sum(steps) / len(steps))
        begun = row["step"]


@pytest.mark.parametrize(
    ("every", "last"),
    [((50, 175, 35), 350), ((4, 12, 5), 24), ((10, 3, 1), 25), ((7, 7, 7), 21), ((5, 1, 2), 12), ((100, 9, 4), 30)],
    ids=["demo.yaml", *"abcde"],
)
def test_speed_and_mfu_leave_pauses_out_whatever_is_logged_validated_and_saved_when(
    paths, tmp_path, monkeypatch, every, last
):
    clocked(monkeypatch)
    names = ("runtime.log_every", "train.validate_every", "train.save_every")
    config = settings(f"train.max_steps={last}", *(f"{name}={n}" for name, n in zip(names, every, strict=True)))
    train_model(config, at(paths, tmp_path / "run"), ALONE)
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == sorted({*range(every[0], last + 1, every[0]), last})
    check_rates(rows, 0)


@pytest.mark.parametrize(("broken", "saved"), [(38, 35), (71, 70), (50, 35), (106, 105)])
def test_the_first_row_of_a_training_that_goes_on_says_over_how_many_steps_it_is(
    paths, tmp_path, monkeypatch, broken, saved
):
    config = settings("train.max_steps=140", "runtime.log_every=50", "train.validate_every=175", "train.save_every=35")
    run = at(paths, tmp_path / "run")
    with monkeypatch.context() as patch:
        clocked(patch, broken)
        with pytest.raises(KeyboardInterrupt):
            train_model(config, run, ALONE)
    before = metrics(run.run)
    clocked(monkeypatch)
    train_model(config, run, ALONE)
    rows = metrics(run.run)[sum(row["step"] <= saved for row in before) :]
    assert rows[0]["steps"] == rows[0]["step"] - saved
    check_rates(rows, saved)


AVX2 = "processor : 0\nflags : fpu sse4_2 fma avx avx2 f16c\n"


@pytest.mark.parametrize(("precision", "warned"), [("float32", 0), ("bfloat16", 1), ("float16", 1)])
def test_half_precision_is_warned_of_once_with_the_factor_where_the_cpu_lacks_it(
    paths, tmp_path, monkeypatch, caplog, precision, warned
):
    (tmp_path / "cpuinfo").write_text(AVX2)
    monkeypatch.setattr(host, "CPU_INFO", tmp_path / "cpuinfo")
    run = at(paths, tmp_path / "run")
    train_model(settings(f"train.precision={precision}", "train.max_steps=2"), run, ALONE)
    told = [record.getMessage() for record in caplog.records if "20 times" in record.getMessage()]
    assert len(told) == warned
    assert all(f"train.precision is {precision}" in line for line in told)
    caplog.clear()
    Translator.load(run.run, settings(f"translate.precision={precision}").translate, device="cpu")
    told = [record.getMessage() for record in caplog.records if "20 times" in record.getMessage()]
    assert len(told) == warned
    assert all(f"translate.precision is {precision}" in line for line in told)


def interrupted(monkeypatch, config: Config, paths: TrainPaths, step: int) -> None:
    """Train until the process breaks at the beginning of `step`."""
    take_step = loop.train_step

    def breaking(trainer, update, number):
        if number == step:
            raise KeyboardInterrupt
        return take_step(trainer, update, number)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", breaking)
        with pytest.raises(KeyboardInterrupt):
            train_model(config, paths, ALONE)


@pytest.mark.parametrize("changes", [(), ("bpe.dropout=0.1", "model.attention_dropout=0.1")], ids=["plain", "sampled"])
def test_a_training_that_goes_on_ends_with_the_same_weights(paths, tmp_path, monkeypatch, changes):
    config = settings(*changes)
    train_model(config, at(paths, tmp_path / "whole"), ALONE)
    for step in (3, 13, 24):  # Before the first checkpoint, inside an epoch, at the very end.
        interrupted(monkeypatch, config, at(paths, tmp_path / "cut"), step)
    assert json.loads((tmp_path / "cut" / "status.json").read_text())["state"] == "preempted"
    train_model(config, at(paths, tmp_path / "cut"), ALONE)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert equal(*(checkpoint.load(tmp_path / run / "final")[0] for run in ("whole", "cut")))
    metrics = [
        list(map(json.loads, (tmp_path / run / "metrics.jsonl").read_text().split("\n")[:-1]))
        for run in ("whole", "cut")
    ]
    assert [row["step"] for row in metrics[1]] == sorted(row["step"] for row in metrics[1])
    losses = [[row["loss"] for row in rows if row["kind"] == "dev"] for rows in metrics]
    assert losses[0] == losses[1]


def test_a_finished_run_run_again_writes_nothing(paths, tmp_path):
    train_model(settings(), at(paths, tmp_path / "run"), ALONE)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"

    def files() -> dict[Path, tuple[int, bytes]]:
        found = sorted((tmp_path / "run").rglob("*"))
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in found if path.is_file()}

    kept = files()
    train_model(settings("runtime.log_every=3"), at(paths, tmp_path / "run"), ALONE)
    assert files() == kept


def test_other_settings_are_refused_with_old_and_new_and_fresh_starts_over(paths, tmp_path):
    run = at(paths, tmp_path / "run")
    train_model(settings(), run, ALONE)
    with pytest.raises(ConfigError, match=r"train\.label_smoothing: 0\.1 -> 0\.3"):
        train_model(settings("train.label_smoothing=0.3"), run, ALONE)
    train_model(settings("train.max_steps=26", "runtime.log_every=1"), run, ALONE)
    assert checkpoint.newest(run.run).name == "step-00000026"
    train_model(settings("train.label_smoothing=0.3"), run, ALONE, fresh=True)
    assert read_config(run.run).train.label_smoothing == 0.3
    assert checkpoint.newest(run.run).name == "step-00000024"


@pytest.mark.parametrize(
    ("changes", "world"),
    [
        ((), ALONE),
        (("train.batch_tokens=40", "train.max_steps=1000"), ALONE),
        (("train.max_steps=1",), World(0, 3, torch.device("cpu"))),
        (("bpe.shared_vocab=false", "train.max_steps=123456"), ALONE),
    ],
)
def test_the_first_line_of_a_training_says_what_is_trained_where_and_for_how_long(paths, changes, world):
    config = settings(*changes)
    data = open_dataset(paths.encode, "train", "en", "zh")
    trainer = replace(Trainer.build(config, ALONE, (340, 340)), world=world)
    line = loop.header(trainer, data, Path("runs/x"))
    train, lengths = config.train, (data.src.lengths, data.tgt.lengths)
    updates = len(next(plan_epoch(*lengths, train.batch_tokens, train.length_buckets, train.seed, 0)))
    epochs, rounded = train.max_steps / updates, 0 if train.max_steps >= 10 * updates else 1
    assert f"({epochs:,.{rounded}f} epochs of {updates:,} updates)" in line
    size = sum(parameters(config.model, 340, None if config.bpe.shared_vocab else 340).values())
    assert line.startswith(
        f"{size / 1e6:.1f} M parameters, {world.size} process{'es' if world.size > 1 else ''} on cpu, "
    )
    assert f"float32, {train.max_steps:,} updates of {train.batch_tokens} tokens a side (" in line
    assert line.endswith(", runs/x")


def test_a_training_is_never_silent_from_its_start_to_its_first_measurement(paths, tmp_path, caplog):
    caplog.set_level(logging.INFO, "nmt")
    run = at(paths, tmp_path / "run")
    train_model(settings("train.max_steps=12", "runtime.log_every=6"), run, ALONE)
    told = [message.split(",")[0] for message in caplog.messages if message.startswith("train: ")]
    assert told[0].endswith(" M parameters")
    assert told[1:4] == ["train: step 6/12", "train: step 12/12", "train: step 12/12"]
    assert "final is the " in caplog.text
    assert told[-1].startswith("train: done in ")
    caplog.clear()
    train_model(settings("train.max_steps=14"), run, ALONE)
    assert "resuming from" in caplog.messages[0] or "resuming" in caplog.messages[1]
    assert any("14 updates of 150" in message for message in caplog.messages)


def test_a_run_folder_is_whole_in_itself(paths, tmp_path):
    run = at(paths, tmp_path / "运行 1")
    train_model(settings(), run, ALONE)
    names = {path.name for path in run.run.iterdir()}
    assert {"config.json", "tokenizer", "normalisation.json", "final", "best", "checkpoints", "metrics.jsonl"} <= names
    assert read_config(run.run) == settings()
    found = json.loads((run.run / "provenance.json").read_text())
    assert found["packages"]["torch"] == torch.__version__
    assert len(checkpoint.saved_steps(run.run)) == 3
    state = json.loads((run.run / "final" / "state.json").read_text())
    assert set(state["dev_scores"]) >= {"average of 3"}
    assert max(state["dev_scores"].values()) == state["dev_scores"][state["made_of"]]


def test_patience_ends_a_training_that_gets_no_better(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(validation, "translate_dev", lambda *_: (1.0, [""] * 9))
    config = settings("train.early_stop_patience=2", "train.validate_every=2", "train.max_steps=100")
    train_model(config, at(paths, tmp_path / "run"), ALONE)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["step"], status["best_step"], status["state"]) == (6, 2, "finished")


def test_fine_tuning_begins_with_the_weights_of_another_run(paths, tmp_path, monkeypatch):
    train_model(settings(), at(paths, tmp_path / "first"), ALONE)
    config = settings("optim.learning_rate=1e-9", "optim.schedule=constant")
    train_model(config, at(paths, tmp_path / "second"), ALONE, init_from=tmp_path / "first")
    first, second = (checkpoint.load(tmp_path / run / "final")[0] for run in ("first", "second"))
    assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)
    (tmp_path / "first" / "tokenizer" / "joint.model").write_bytes(b"another")
    with pytest.raises(CheckpointError, match="another vocabulary"):
        train_model(config, at(paths, tmp_path / "third"), ALONE, init_from=tmp_path / "first")


def test_two_vocabularies_train_and_translate(paths, tmp_path):
    folders = {name: tmp_path / name for name in ("bpe", "encode")}
    for folder in folders.values():
        folder.mkdir()
    bpe = BpeConfig(vocab_size=300, character_coverage=1.0, shared_vocab=False)
    train_bpe(paths.clean, bpe, ("en", "zh"), folders["bpe"])
    encode_corpus(paths.clean, folders["bpe"], EncodeConfig(), ("en", "zh"), folders["encode"])
    config = settings("bpe.shared_vocab=false", "bpe.vocab_size=300", "train.max_steps=4")
    train_model(config, TrainPaths(paths.clean, run=tmp_path / "run", **folders), ALONE)
    translator = Translator.load(tmp_path / "run", device="cpu")
    assert translator.model.src_embedding is not None
    assert len(translator.translate(["red cup", "", "three"])) == 3


@pytest.mark.slow
def test_a_compiled_model_takes_the_steps_of_a_plain_one(paths, tmp_path):
    runs = []
    for compiled in ("false", "true"):
        config = settings("model.dropout=0", "train.max_steps=3", "runtime.log_every=1", f"runtime.compile={compiled}")
        train_model(config, at(paths, tmp_path / compiled), ALONE)
        runs.append(losses(tmp_path / compiled))
    assert runs[0] == pytest.approx(runs[1], abs=1e-4)
    assert checkpoint.load_model(tmp_path / "true", config) is not None


def test_a_training_in_bfloat16_keeps_float32_weights(paths, tmp_path):
    train_model(settings("train.precision=bfloat16", "train.max_steps=4"), at(paths, tmp_path / "bf16"), ALONE)
    loaded = weights(tmp_path / "bf16", 4)
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in loaded.values())


@pytest.mark.parametrize("tasks", [0, 1, 2, 3, 7])
def test_every_process_learns_every_result_even_with_fewer_batches_than_processes(tasks):
    told: dict[int, bytes] = {}

    class Rank:
        size = 3

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def gather(self, data: bytes) -> list[bytes]:
            told[self.rank] = data
            return [told.get(rank, b"[]") for rank in range(self.size)]

    def work(task: int) -> list[list[float]]:
        return [[task, 0.1 * task, -math.inf]]

    for rank in range(3):  # What each has to say ...
        list(validation.share_among(Rank(rank), tasks, work))
    assert sorted(told) == [0, 1, 2]
    for rank in range(3):  # ... and what each hears.
        found = dict(validation.share_among(Rank(rank), tasks, work))
        assert found == {task: work(task) for task in range(tasks)}


MANY_SHAPES = """
import os, sys, torch
torch.set_num_threads(1)
from nmt.model.flops import parameters
from nmt.training.step import Trainer
from tiny import ALONE, settings
if sys.argv[1] == "bounded":
    Trainer.build(settings("train.precision=bfloat16"), ALONE, (340, 340))
# Not the largest so far, which a process inherits from the one that has started it.
held = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
x, weight = torch.ones(700, 256, dtype=torch.bfloat16), torch.ones(256, 256, dtype=torch.bfloat16)
before = held()
for rows in range(100, 700):
    torch.mm(x[:rows], weight)
print(held() - before)
"""


@pytest.mark.skipif(host.fast_bfloat16(host.CPU_INFO) is None, reason="this CPU has no products of bfloat16")
def test_memory_does_not_grow_with_each_shape_of_a_bfloat16_product():
    grown = []
    for word in ("bounded", "free"):
        command = [sys.executable, "-c", MANY_SHAPES, word]
        places = os.pathsep.join([str(Path(__file__).parent), str(Path(loop.__file__).parents[1])])
        clean = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
        done = subprocess.run(
            command, env=clean | {"PYTHONPATH": places}, check=True, timeout=300, capture_output=True, text=True
        )
        grown.append(float(done.stdout))
    assert 2 * grown[0] < grown[1]


def test_progress_is_plain_numbers_that_json_keeps():
    progress = Progress(step=3, epoch=1, update=2, best_score=-1.5, best_step=2, bad_validations=1)
    assert Progress(**json.loads(json.dumps(dataclasses.asdict(progress)))) == progress
