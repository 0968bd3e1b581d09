"""The parts of the training loop one at a time: measurements, the order of updates, ends and what they leave."""

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import sys
import threading
import tracemalloc
from dataclasses import asdict, replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nmt.data import batching
from nmt.data.batching import plan_epoch
from nmt.data.dataset import Column, ParallelDataset, open_dataset
from nmt.data.tokenizer import load_tokenizers
from nmt.distributed.world import World
from nmt.errors import CheckpointError, DataError, LostContact, NmtError, Preempted
from nmt.io import read_lines
from nmt.runs import checkpoint
from nmt.runs.run_dir import RunDir
from nmt.training import loop as training
from nmt.training.loop import Meter, is_finished, peak_memory, record_failure, resume, should_stop, train_model, updates
from nmt.training.memory import worst_case_batch
from nmt.training.saver import Saver, write_status
from nmt.training.step import StepStats, Trainer, prepare, train_step
from nmt.training.validation import Progress
from tiny import ALONE, at, equal, metrics, settings, state

# ── measurements ────────────────────────────────────────────────────────────────────────────────────────────────────


def stats(loss: float, nll: float, norm: float, tokens: int, *, skipped: bool = False, rate: float = 0.1) -> StepStats:
    seconds = {"data": 0.1 * tokens, "forward": 2.0}
    parts = [torch.tensor(value, dtype=torch.float64) for value in (loss, nll, norm, float(skipped))]
    return StepStats(*parts, rate, tokens, 3 * tokens, 5.0 * tokens, tokens / 100, seconds)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    return now


def test_a_report_has_the_means_over_its_steps_and_tokens(clock):
    meter = Meter(ALONE, "float32")
    meter.add(stats(30.0, 20.0, 1.0, 10))
    meter.add(stats(90.0, 70.0, 3.0, 20, rate=0.2))
    clock[0] += 6
    found = meter.report()
    assert found.pop("peak_memory_mib") > 1
    assert found == pytest.approx(
        {
            "loss": 120 / 30,
            "nll": 90 / 30,
            "ppl": math.exp(3),
            "learning_rate": 0.2,
            "grad_norm": 2.0,
            "steps": 2,
            "tokens_per_second": 90 / 6,
            "padding": 0.15,
            "seconds_data": 1.5,
            "seconds_forward": 2.0,
        }
    )
    meter.add(stats(8.0, 8.0, 1.0, 4))
    clock[0] += 3
    assert meter.report()["loss"] == 2, "only of the steps since the last report"


def test_a_step_that_was_left_out_counts_for_the_speed_alone(clock):
    meter = Meter(ALONE, "float32")
    meter.add(stats(math.nan, math.nan, math.nan, 10, skipped=True))
    meter.add(stats(40.0, 1e6, 3.0, 20))
    clock[0] += 6
    found = meter.report()
    assert (found["loss"], found["grad_norm"], found["tokens_per_second"]) == (2.0, 3.0, 15.0)
    assert found["ppl"] == pytest.approx(math.exp(20)), "a bound, so that every chart can show it"
    meter.add(stats(math.nan, math.nan, math.nan, 10, skipped=True))
    clock[0] += 1
    found = meter.report()
    assert found["tokens_per_second"] == 30
    assert not {"loss", "nll", "ppl", "learning_rate", "grad_norm"} & found.keys()


def test_time_that_went_into_something_else_is_no_time_of_steps(clock):
    meter = Meter(ALONE, "float32")
    meter.add(stats(1.0, 1.0, 1.0, 10))
    clock[0] += 6
    with meter.paused():  # Before the steps are reported,
        clock[0] += 50
    assert meter.report()["tokens_per_second"] == 5
    with meter.paused():  # or after that.
        clock[0] += 100
    meter.add(stats(1.0, 1.0, 1.0, 10))
    clock[0] += 3
    assert meter.report()["tokens_per_second"] == 10


def test_losses_are_summed_over_processes_and_the_speed_is_a_share_of_all_their_peaks(clock, monkeypatch):
    world = SimpleNamespace(size=2, device=torch.device("cuda"), sum=lambda values: [2 * value for value in values])
    monkeypatch.setattr(training.torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(training.torch.cuda, "max_memory_allocated", lambda device: 3 * 2**20)
    meter = Meter(world, "bfloat16")
    meter.add(stats(30.0, 20.0, 1.0, 10))
    clock[0] += 5
    found = meter.report()
    assert (found["loss"], found["nll"]) == (6, 4)
    assert found["mfu"] == pytest.approx(50 / 5 / (2 * 989e12))
    assert found["peak_memory_mib"] == 3
    assert Meter(world, "float32").peak is None


def test_the_most_memory_held_is_in_mib():
    with open("/proc/self/statm") as stream:
        now = int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20
    assert 0.9 * now <= peak_memory(torch.device("cpu")) < machine
    with open("/proc/self/status") as stream:
        most = int(next(line for line in stream if line.startswith("VmHWM")).split()[1]) / 2**10
    assert peak_memory(torch.device("cpu")) == pytest.approx(most, rel=0.1)


# ── where it begins ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("setting", "found", "cut_by", "noted"),
    [("40", 0, 40, 0), ("40", 7, 40, 0), ("auto", 0, 30, 30), ("auto", 7, 7, 7)],
)
def test_the_micro_batches_that_auto_has_found_once_stay_and_a_number_is_a_number(
    paths, monkeypatch, setting, found, cut_by, noted
):
    def probe_memory(trainer, data):
        finds = setting == "auto" and trainer.device_tokens == 40
        return replace(trainer, device_tokens=30) if finds else trainer

    monkeypatch.setattr(training, "probe_memory", probe_memory)
    trainer = Trainer.build(settings(), ALONE, (340, 340))
    trainer = replace(trainer, config=settings(f"runtime.device_tokens={setting}"))  # As it is on a GPU.
    data = open_dataset(paths.encode, "train", "en", "zh")
    trainer, progress = training.fit_memory(trainer, data, Progress(step=5, device_tokens=found))
    assert (trainer.device_tokens, progress.device_tokens) == (cut_by, noted)


def test_a_model_has_the_vocabulary_of_each_side(paths, tmp_path, monkeypatch):
    asked, dev = [], SimpleNamespace(tokenizers=(range(300), range(340)))
    monkeypatch.setattr(training, "open_data", lambda *_: (None, dev))

    def build(config, world, sizes, at):
        asked.append(sizes)
        raise NmtError("that is enough")

    monkeypatch.setattr(training, "Trainer", SimpleNamespace(build=build))
    with pytest.raises(NmtError, match="enough"):
        train_model(settings(), replace(paths, run=tmp_path / "run"), ALONE)
    assert asked == [(300, 340)]


def test_fresh_trains_a_finished_run_again_and_without_it_nothing_is_done(paths, finished, tmp_path, monkeypatch):
    shutil.copytree(finished.run, tmp_path / "run")
    run, steps, take_step = replace(finished, run=tmp_path / "run"), [], training.train_step

    def counted(trainer, update, step):
        steps.append(step)
        return take_step(trainer, update, step)

    monkeypatch.setattr(training, "train_step", counted)
    train_model(settings(*FINISHED), run, ALONE)
    assert steps == []
    train_model(settings(*FINISHED), run, ALONE, fresh=True)
    assert steps[:2] == [1, 2]


def test_a_training_that_begins_with_another_run_asks_whether_that_one_has_seen_the_test_set(
    paths, finished, tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setattr(training, "warn_of_overlap", lambda *given: asked.append(given))
    run = replace(finished, run=tmp_path / "run")
    train_model(settings("train.max_steps=1"), run, ALONE, init_from=finished.run)
    assert asked == [(run.run, run.clean, ("en", "zh"))]


# ── which update comes next ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("window", [60, batching.WINDOW])
def test_updates_are_those_of_the_plan_of_each_epoch_from_where_the_training_is(paths, monkeypatch, window):
    monkeypatch.setattr(batching, "WINDOW", window)
    config, data = settings("train.seed=3"), open_dataset(paths.encode, "train", "en", "zh")
    tokenizers = load_tokenizers(paths.bpe, "en", "zh")
    plans = [list(plan_epoch(data.src.lengths, data.tgt.lengths, 150, 1, 3, epoch)) for epoch in range(3)]
    assert (len(plans[0]) > 2) == (window == 60)
    expected = [
        (epoch, number, n + 1, pairs.tolist())
        for epoch, windows in enumerate(plans)
        for number, plan in enumerate(windows)
        for n, pairs in enumerate(plan)
    ]

    def taken(progress: Progress, count: int) -> list:
        found = islice(updates(config, paths, data, tokenizers, progress), count)
        return [(*place, pairs.tolist()) for _, pairs, place in found]

    assert taken(Progress(), len(expected)) == expected
    first, epoch = len(plans[0][0]), sum(map(len, plans[0]))
    for done in (1, 5, first, first + 2, epoch, epoch + 2):
        epoch, number, update, _ = expected[done - 1]
        assert taken(Progress(epoch=epoch, window=number, update=update), 4) == expected[done : done + 4]


def evenly(pairs: int) -> ParallelDataset:
    """Pairs of 2 to 40 tokens."""
    lengths = [2 + (np.arange(pairs) * factor) % 39 for factor in (7, 11)]
    columns = [Column(np.full(side.sum(), 9, np.uint16), np.concatenate([[0], np.cumsum(side)])) for side in lengths]
    return ParallelDataset(*columns, np.arange(pairs))


def test_no_work_in_python_before_the_first_batch_or_in_a_step_grows_with_the_corpus(paths):
    config, tokenizers = settings("train.batch_tokens=2000"), load_tokenizers(paths.bpe, "en", "zh")
    trainer, counts, sizes = Trainer.build(config, ALONE, (340, 340)), [], []
    for pairs in (2 * batching.WINDOW, 8 * batching.WINDOW):
        data, calls = evenly(pairs), [0]

        def count(*_, calls=calls):
            calls[0] += 1

        sys.setprofile(count)
        training.header(trainer, data, paths.run)
        worst_case_batch(trainer, data)
        _, plan, _, _ = next(training.plans(config, paths, data, tokenizers, Progress()))
        prepare(trainer, data, plan[0])
        sys.setprofile(None)
        counts.append(calls[0])
        tracemalloc.start()
        for number in range(3):
            prepare(trainer, data, np.arange(number, pairs, pairs // 90))
        sizes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert counts[1] < 1.2 * counts[0], counts
    assert sizes[1] < 1.2 * sizes[0], sizes
    assert sizes[1] < pairs, "bytes: nothing is as large as the corpus"


@pytest.mark.parametrize("sampled", [(), ("bpe.dropout=0.3",)], ids=["plain", "sampled"])
def test_updates_and_their_pieces_are_the_same_from_wherever_a_training_goes_on(paths, monkeypatch, sampled):
    monkeypatch.setattr(batching, "WINDOW", 60)
    config, tokenizers = settings(*sampled), load_tokenizers(paths.bpe, "en", "zh")
    plain = open_dataset(paths.encode, "train", "en", "zh")

    def taken(progress: Progress, count: int) -> list:
        found = islice(updates(config, paths, plain, tokenizers, progress), count)
        ids = [(place, [side.tolist() for side in data.take(pairs)]) for data, pairs, place in found]
        return [(place, [sorted(map(tuple, side)) for side in sides]) for place, sides in ids]

    expected = taken(Progress(), 60)
    assert expected[-1][0][:2] > (0, 2), "several windows, and more than an epoch"
    for done in (0, 1, 7, 20, 40, 50):
        epoch, window, update = expected[done][0]
        assert taken(Progress(epoch=epoch, window=window, update=update), 5) == expected[done + 1 : done + 6]


def test_only_the_text_of_windows_that_are_planned_is_cut_anew(paths, monkeypatch):
    monkeypatch.setattr(batching, "WINDOW", 40)
    cut, honest = [], training.resample
    monkeypatch.setattr(
        training, "resample", lambda plain, pairs, *more: cut.append(pairs) or honest(plain, pairs, *more)
    )
    config, tokenizers = settings("bpe.dropout=0.3"), load_tokenizers(paths.bpe, "en", "zh")
    plain = open_dataset(paths.encode, "train", "en", "zh")
    with contextlib.closing(updates(config, paths, plain, tokenizers, Progress(epoch=2, window=1))) as found:
        next(found)
    assert 1 <= len(cut) <= 2, "its own and at most the next one, which is planned meanwhile"
    assert cut[0].tolist() == list(batching.windows(150, config.train.seed, 2))[1].tolist()


def test_each_window_of_each_epoch_and_seed_is_cut_by_numbers_of_its_own(paths, monkeypatch):
    monkeypatch.setattr(batching, "WINDOW", 60)
    seeds, tokenizers = [], load_tokenizers(paths.bpe, "en", "zh")
    plain = open_dataset(paths.encode, "train", "en", "zh")
    monkeypatch.setattr(training, "resample", lambda *given: seeds.append(given[5]) or plain)
    for changes in ((), ("train.seed=2",), ()):
        list(islice(training.plans(settings("bpe.dropout=0.3", *changes), paths, plain, tokenizers, Progress()), 9))
    assert len(set(seeds)) == 18, "three windows of three epochs"
    assert seeds[:9] == seeds[18:]


@pytest.mark.parametrize("end", ["whole", "raises", "stops"])
def test_no_thread_outlives_a_training_however_it_ends(paths, tmp_path, monkeypatch, end):
    step_of, before = training.train_step, threading.active_count()

    def ending(trainer, update, number):
        if number == 8 and end == "raises":
            raise ZeroDivisionError
        if number == 8 and end == "stops":
            os.kill(os.getpid(), signal.SIGTERM)
        return step_of(trainer, update, number)

    monkeypatch.setattr(training, "train_step", ending)
    with contextlib.suppress(ZeroDivisionError, Preempted):
        train_model(settings("bpe.dropout=0.1"), at(paths, tmp_path / "run"), ALONE)
    assert state(tmp_path / "run")["state"] == {"whole": "finished", "raises": "failed", "stops": "preempted"}[end]
    assert threading.active_count() == before


def test_an_error_of_the_thread_that_is_ahead_ends_the_training_with_it(paths, tmp_path, monkeypatch):
    honest, prepared = training.prepare, []

    def failing(trainer, data, pairs):
        prepared.append(pairs)
        if len(prepared) == 7:
            raise DataError("the disk is gone")
        return honest(trainer, data, pairs)

    monkeypatch.setattr(training, "prepare", failing)
    with pytest.raises(DataError, match="the disk is gone"):
        train_model(settings("runtime.log_every=1"), at(paths, tmp_path / "run"), ALONE)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_bpe_dropout_cuts_the_text_anew_in_each_epoch_and_lines_keep_their_pairs(paths):
    config, tokenizers = settings("bpe.dropout=0.3"), load_tokenizers(paths.bpe, "en", "zh")
    english, chinese = (read_lines(paths.clean / f"train.{language}") for language in ("en", "zh"))
    seen = {}
    for data, _, (epoch, _, _) in updates(
        config, paths, open_dataset(paths.encode, "train", "en", "zh"), tokenizers, Progress()
    ):
        if epoch == 3:
            break
        seen[epoch] = data
    for data in seen.values():
        for i in (0, 17, 149):
            assert tokenizers[0].decode([data.src[i].tolist()]) == [english[data.rows[i]]]
            assert tokenizers[1].decode([data.tgt[i].tolist()]) == [chinese[data.rows[i]]]
    assert len({tuple(data.src.ids.tolist()) for data in seen.values()}) == 3
    assert len({tuple(data.tgt.ids.tolist()) for data in seen.values()}) == 3
    plain = open_dataset(paths.encode, "train", "en", "zh")
    data, _, _ = next(updates(settings("bpe.dropout=0.3", "train.seed=9"), paths, plain, tokenizers, Progress()))
    assert not np.array_equal(data.src.ids, seen[0].src.ids)


def test_sampled_pieces_are_never_more_than_a_sentence_may_have(paths):
    tokenizers, plain = load_tokenizers(paths.bpe, "en", "zh"), open_dataset(paths.encode, "train", "en", "zh")
    most = int(max(plain.src.lengths.max(), plain.tgt.lengths.max()))
    config = settings("bpe.dropout=0.9", f"encode.max_tokens={most}")
    data, _, _ = next(updates(config, paths, open_dataset(paths.encode, "train", "en", "zh"), tokenizers, Progress()))
    assert max(data.src.lengths.max(), data.tgt.lengths.max()) <= most


# ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("step", "bad_validations", "patience", "over"),
    [(23, 0, 0, False), (24, 0, 0, True), (25, 0, 0, True), (5, 99, 0, False), (5, 1, 2, False), (5, 2, 2, True)],
)
def test_a_training_is_over_after_its_steps_or_its_patience(step, bad_validations, patience, over):
    assert (
        should_stop(
            settings(f"train.early_stop_patience={patience}"), Progress(step=step, bad_validations=bad_validations)
        )
        is over
    )


FINISHED = ("train.max_steps=6", "runtime.log_every=4", "train.save_every=4")


@pytest.fixture(scope="module")
def finished(paths, tmp_path_factory):
    run = at(paths, tmp_path_factory.mktemp("finished") / "run")
    train_model(settings(*FINISHED), run, ALONE)
    return run


def test_a_run_is_finished_if_it_has_all_its_steps_and_its_final_model(finished):
    def ended(*changes: str, run=finished) -> bool:
        return is_finished(settings(*FINISHED, *changes), run, None)

    assert ended()
    for change in ("train.max_steps=7", "train.max_steps=5", "train.seed=2"):
        assert not ended(change)
    assert not ended(run=at(finished, finished.run.parent / "none"))
    status, final = finished.run / "status.json", finished.run / "final"
    kept = status.read_text()
    for text in (
        kept.replace("finished", "running"),
        kept.replace('"step": 6', '"step": 5'),
        "{}",
        "[",
        json.dumps({"state": "finished", "steps": 6}),
    ):
        assert text != kept
        status.write_text(text)
        assert not ended()
    status.write_text(kept)
    final.rename(final.with_name("gone"))
    assert not ended()
    final.with_name("gone").rename(final)
    assert ended()


def test_the_last_step_is_logged_validated_and_saved_whatever_the_intervals(finished):
    assert [row["step"] for row in metrics(finished.run)] == [4, 6]
    assert [row["step"] for row in metrics(finished.run, "dev")] == [6]
    assert [path.name for path in checkpoint.saved_steps(finished.run)] == ["step-00000004", "step-00000006"]
    assert (state(finished.run)["state"], state(finished.run)["step"]) == ("finished", 6)
    rows = metrics(finished.run)
    assert all(row["epoch"] == 0 and row["skipped"] == 0 for row in rows)
    assert rows[0]["learning_rate"] == pytest.approx(16**-0.5 * 4 * 10**-1.5)


def test_steps_are_logged_validated_and_saved_at_their_intervals(paths, tmp_path):
    intervals = ("runtime.log_every=2", "train.validate_every=3", "train.save_every=4", "train.keep_checkpoints=9")
    train_model(settings("train.max_steps=12", *intervals), at(paths, tmp_path / "run"), ALONE)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [2, 4, 6, 8, 10, 12]
    assert [row["step"] for row in metrics(tmp_path / "run", "dev")] == [3, 6, 9, 12]
    assert [int(path.name[5:]) for path in checkpoint.saved_steps(tmp_path / "run")] == [4, 8, 12]
    best = state(tmp_path / "run")["best_step"]
    weights, progress = checkpoint.load(tmp_path / "run" / "best")
    assert (progress["step"], progress["best_step"]) == (best, best)
    if best % 4 == 0:
        assert equal(weights, checkpoint.load(checkpoint.step_folder(tmp_path / "run", best))[0])


# ── what an end leaves ──────────────────────────────────────────────────────────────────────────────────────────────


def a_world(rank: int, size: int) -> World:
    return World(rank, size, torch.device("cpu"))


@pytest.fixture
def word(monkeypatch, tmp_path):
    """The message that torchrun is left, if any."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "word.json"))

    def read() -> dict | None:
        found = tmp_path / "word.json"
        return json.loads(found.read_text())["message"] if found.exists() else None

    return read


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NmtError("too small"), "process 0 of 2, step 1,234: too small"),
        (ValueError("odd"), "process 0 of 2, step 1,234: ValueError: odd"),
    ],
)
def test_a_failure_is_written_down_with_its_process_step_and_kind(tmp_path, word, error, told):
    (tmp_path / "status.json").write_text('{"state": "running", "step": 7}')
    assert record_failure(RunDir(tmp_path), a_world(0, 2), 1234, error) is error
    assert state(tmp_path) == {"state": "failed", "step": 7}
    assert word()["message"] == told


@pytest.mark.parametrize("error", [Preempted("stopped", 143), KeyboardInterrupt(), SystemExit(1)])
def test_an_end_that_was_asked_for_is_no_failure(tmp_path, word, error):
    (tmp_path / "status.json").write_text('{"state": "running", "step": 7}')
    assert record_failure(RunDir(tmp_path), a_world(0, 2), 7, error) is error
    assert state(tmp_path) == {"state": "preempted", "step": 7}
    assert word() is None


def test_one_process_alone_leaves_no_word_and_others_than_the_first_write_no_status(tmp_path, word):
    (tmp_path / "status.json").write_text('{"state": "running"}')
    record_failure(RunDir(tmp_path), a_world(0, 1), 7, NmtError("x"))
    assert word() is None
    (tmp_path / "status.json").write_text('{"state": "running"}')
    record_failure(RunDir(tmp_path), a_world(1, 2), 7, NmtError("x"))
    assert state(tmp_path) == {"state": "running"}
    assert word()["message"].startswith("process 1 of 2")
    ended = record_failure(RunDir(tmp_path), a_world(1, 2), 7, Preempted("stopped", 143))
    assert isinstance(ended, SystemExit)
    assert ended.code == Preempted("stopped", 143).exit_code, "one process has told it for all"


def test_an_end_before_there_is_a_status_keeps_its_own_reason(tmp_path):
    error = NmtError("the disk is full")
    assert record_failure(RunDir(tmp_path / "none"), a_world(0, 1), 0, error) is error


def test_lost_contact_is_told_as_a_consequence(tmp_path, word, monkeypatch):
    (tmp_path / "status.json").write_text('{"state": "running"}')
    monkeypatch.setattr(training, "is_lost_contact", lambda error: isinstance(error, RuntimeError))
    monkeypatch.setattr("nmt.distributed.launcher.time.time", lambda: 1000.0)
    ended = record_failure(RunDir(tmp_path), a_world(0, 2), 7, RuntimeError("Connection closed by peer\nmore"))
    assert isinstance(ended, LostContact)
    assert str(ended) == "lost contact with the other processes: Connection closed by peer"
    later = float(word()["extraInfo"]["timestamp"])
    record_failure(RunDir(tmp_path), a_world(0, 2), 7, NmtError("a cause"))
    assert later > float(word()["extraInfo"]["timestamp"]), "so the cause is shown and not this"


# ── checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_saved_is_what_goes_on(paths, tmp_path):
    data = open_dataset(paths.encode, "train", "en", "zh")
    trainer, other = (Trainer.build(settings("train.precision=float16"), ALONE, (340, 340)) for _ in range(2))
    train_step(trainer, prepare(trainer, data, np.arange(9)), 1)
    progress = Progress(
        step=5, epoch=1, update=2, best_score=3.5, best_step=4, bad_validations=1, skipped=2, device_tokens=7
    )
    trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": 1024.0, "_growth_tracker": 6})
    with Saver(trainer, RunDir(tmp_path)) as saver:
        saver.save(progress)
    assert state(tmp_path) == {"state": "running", **asdict(progress)}
    loaded = resume(other, RunDir(tmp_path), None)
    assert loaded == replace(progress, loss_scale=1024.0, scale_steps=6)
    assert (other.scaler.get_scale(), other.scaler.state_dict()["_growth_tracker"]) == (1024.0, 6)
    assert equal(*(dict(one.model.state_dict()) for one in (trainer, other)))
    assert equal(*(checkpoint.optimizer_tensors(one.optimizer, one.model) for one in (trainer, other)))
    assert resume(other, RunDir(tmp_path / "none"), None) == Progress()


def test_only_the_newest_checkpoints_are_kept(paths, tmp_path):
    trainer = Trainer.build(settings("train.keep_checkpoints=2", "train.save_every=5"), ALONE, (340, 340))
    with Saver(trainer, RunDir(tmp_path)) as saver:
        for step in (5, 10, 13, 15):
            saver.save(Progress(step=step))
    assert [int(path.name[5:]) for path in checkpoint.saved_steps(tmp_path)] == [10, 15]


def test_only_the_first_process_writes(paths, tmp_path):
    world = SimpleNamespace(rank=1, size=2, is_main=False, device=ALONE.device)
    trainer = replace(Trainer.build(settings(), ALONE, (340, 340)), world=world)
    with Saver(trainer, RunDir(tmp_path)) as saver:
        saver.save(Progress(step=5), best=True)
    write_status(trainer, RunDir(tmp_path), "running", Progress())
    assert list(tmp_path.iterdir()) == []


def test_weights_of_another_shape_or_without_the_vocabulary_are_refused(paths, finished, tmp_path):
    wide = Trainer.build(settings("model.d_model=32"), ALONE, (340, 340))
    with pytest.raises(CheckpointError, match="do not fit this model and vocabulary"):
        resume(wide, RunDir(tmp_path), finished.run)


def test_weights_are_taken_with_their_own_vocabulary_alone(finished, tmp_path):
    trainer, mine = Trainer.build(settings(), ALONE, (340, 340)), tmp_path / "tokenizer" / "joint.model"
    mine.parent.mkdir()
    mine.write_bytes((finished.run / "tokenizer" / "joint.model").read_bytes())
    assert resume(trainer, RunDir(tmp_path), finished.run) == Progress()
    assert equal(dict(trainer.model.state_dict()), checkpoint.load(finished.run / "final")[0])
    mine.write_bytes(b"another")
    with pytest.raises(CheckpointError, match="has another vocabulary"):
        resume(trainer, RunDir(tmp_path), finished.run)


def test_a_training_says_what_it_goes_on_from_and_that_it_is_finished(paths, finished, caplog):
    with caplog.at_level(logging.INFO):
        train_model(settings(*FINISHED), finished, ALONE)
        resume(Trainer.build(settings(), ALONE, (340, 340)), finished.run, None)
    assert "is finished; nothing to do" in caplog.text
    assert f"resuming from {checkpoint.step_folder(finished.run, 6)}" in caplog.text


def test_the_status_says_running_while_a_training_runs_and_finished_after_it(paths, tmp_path, monkeypatch):
    run, seen = tmp_path / "run", []
    step = training.train_step
    monkeypatch.setattr(training, "train_step", lambda *given: (seen.append(state(run)["state"]), step(*given))[1])
    training.train_model(settings("train.max_steps=2"), at(paths, run), ALONE)
    assert seen == ["running", "running"]
    assert state(run)["state"] == "finished"
