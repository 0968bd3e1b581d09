"""Where a training of several processes begins: at one checkpoint with equal weights, or nowhere, with the reason."""

import json
import logging
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forked import Ended, forked_world
from nmt.config import Config
from nmt.data import dataset
from nmt.distributed.world import World, init_distributed
from nmt.errors import LostContact, NmtError
from nmt.pipeline.stages import train_here
from nmt.runs import checkpoint
from nmt.runs.identity import TrainPaths
from nmt.training import loop, resume, validation
from tiny import ALONE, at, equal, final, metrics, settings, state, weights

CONFIG = settings("runtime.log_every=1")


def train(config: Config, paths: TrainPaths, fault: Callable[[int], object] = lambda rank: None) -> list[Ended]:
    """Train in two processes; `fault` is called in each before it begins."""

    def process(rank: int) -> None:
        fault(rank)
        logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr, force=True)
        train_here(config, paths, device="cpu")

    return forked_world(2, process)


@pytest.fixture(scope="module")
def cut(paths, tmp_path_factory) -> TrainPaths:
    """A run of two processes that has checkpoints of the steps 5 and 10."""
    run = at(paths, tmp_path_factory.mktemp("cut") / "run")
    assert [ended.code for ended in train(replace(CONFIG, train=replace(CONFIG.train, max_steps=10)), run)] == [0, 0]
    shutil.rmtree(run.run / "final")
    return run


@pytest.fixture(scope="module")
def whole(paths, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The final weights of two processes that were not interrupted."""
    run = at(paths, tmp_path_factory.mktemp("whole") / "run")
    assert [ended.code for ended in train(CONFIG, run)] == [0, 0]
    return final(run.run)


# ── faults that one process meets ───────────────────────────────────────────────────────────────────────────────────


def sees_another_disk(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """This process reads checkpoints from a copy of the run folder to which that was done."""

    def fault(run: Path) -> None:
        private, honest = run.with_name("private"), loop.resume
        shutil.copytree(run, private)
        change(private / "checkpoints")
        loop.resume = lambda trainer, _, init_from: honest(trainer, private, init_from)

    return fault


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 8
    path.write_bytes(raw)


def save_another(checkpoints: Path) -> None:
    """A whole checkpoint of the same name from another training."""
    folder = checkpoints / "step-00000010"
    found, progress = checkpoint.load(folder)
    moments = checkpoint.load_optimizer(folder)
    checkpoint.save(folder, {name: 1.01 * tensor for name, tensor in found.items()}, progress, moments)


def reads_wrong_bytes(run: Path) -> None:
    honest = checkpoint.sha256_of
    checkpoint.sha256_of = lambda path: "0" * 64 if "step-00000010/model" in str(path) else honest(path)


def loads_another_step(run: Path) -> None:
    honest = checkpoint.load_training
    checkpoint.load_training = lambda folder, *more: honest(folder.with_name("step-00000005"), *more)


def after_loading(change: Callable[[torch.nn.Module, torch.optim.Optimizer], object]) -> Callable[[Path], None]:
    """This process has what it read, until its memory changes."""

    def fault(run: Path) -> None:
        honest = checkpoint.load_training

        def load(folder, model, optimizer, kind):
            found = honest(folder, model, optimizer, kind)
            with torch.no_grad():
                change(model, optimizer)
            return found

        checkpoint.load_training = load

    return fault


def change_a_weight(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(model.parameters()).view(-1)[7:8].mul_(1 + 1e-6)


def change_a_moment(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[next(model.parameters())]["exp_avg_sq"].add_(1e-9)


def change_a_count(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[next(model.parameters())]["step"].add_(1)


ELSEWHERE = "the run folder must be on a disk that all processes see"
FAULTS = {
    "wrong bytes are read": (reads_wrong_bytes, "step-00000005", "model.safetensors is not what was written"),
    "a flipped bit": (
        sees_another_disk(lambda c: flip(c / "step-00000010/optimizer.safetensors")),
        "step-00000005",
        "optimizer.safetensors is not what was written",
    ),
    "a missing file": (
        sees_another_disk(lambda c: (c / "step-00000010/model.safetensors").unlink()),
        "step-00000005",
        "model.safetensors cannot be read",
    ),
    "a missing manifest": (
        sees_another_disk(lambda c: (c / "step-00000010/manifest.json").unlink()),
        "step-00000005",
        "manifest.json cannot be read",
    ),
    "a missing checkpoint": (
        sees_another_disk(lambda c: shutil.rmtree(c / "step-00000010")),
        "step-00000005",
        "step-00000010/manifest.json cannot be read",
    ),
    "a disk without the run": (sees_another_disk(shutil.rmtree), "", "step-00000010/manifest.json cannot be read"),
    "another checkpoint of that name": (
        sees_another_disk(save_another),
        "step-00000010 is not the checkpoint of that name",
        "step-00000010 is not the checkpoint of that name",
    ),
    "another step": (loads_another_step, "step is 5 on process 0, but 10 on process 1", "step is 10 on process 0, but"),
    "a changed weight": (after_loading(change_a_weight), "the hash of the weights is", "the hash of the weights is"),
    "a changed moment": (
        after_loading(change_a_moment),
        "the hash of the optimizer's state is",
        "the hash of the optimizer's state is",
    ),
    "a changed count": (
        after_loading(change_a_count),
        "the hash of the optimizer's state is",
        "the hash of the optimizer's state is",
    ),
}
"""What is wrong for one process, and what comes of it where that is process 0, and where it is process 1: the step that
both go on from, or what is said."""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_processes_go_on_from_one_step_or_stop_with_the_reason(cut, whole, tmp_path, name, rank):
    fault, expected = FAULTS[name][0], FAULTS[name][1 + rank]
    run = at(cut, tmp_path / "run")
    shutil.copytree(cut.run, run.run)
    told = train(CONFIG, run, lambda mine: fault(run.run) if mine == rank else None)
    codes = [ended.code for ended in told]
    if expected in ("step-00000005", ""):  # Both can: from the older one, or from nothing.
        assert codes == [0, 0], told
        assert equal(final(run.run), whole)
        begun = [line for ended in told for line in ended.told.split("\n") if "resuming from" in line]
        assert {line.rpartition("/")[2] for line in begun} == ({expected} if expected else set())
        return
    assert codes == [1, 1], told
    assert all(expected in ended.told for ended in told), told
    if rank == 1 and "process 0" not in expected and "the hash" not in expected:
        assert f"process 1 of 2: cannot resume from the checkpoint of process 0: {run.run.parent}" in told[0].told
        assert all(ELSEWHERE in ended.told for ended in told)
    assert max(row["step"] for row in metrics(run.run)) == 10, "a step was taken"
    assert state(run.run)["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["missing", "flipped", "another", "another vocabulary"])
def test_processes_that_begin_with_another_run_begin_alike_or_not_at_all(cut, whole, paths, tmp_path, fault, rank):
    first = tmp_path / "first"
    shutil.copytree(cut.run, first)
    checkpoint.save(first / "final", whole, {"step": 24})
    private = tmp_path / "private"
    shutil.copytree(first, private)
    if fault == "another":
        checkpoint.save(private / "final", {name: 1.01 * tensor for name, tensor in whole.items()}, {"step": 24})
    elif fault == "another vocabulary":
        flip(private / "tokenizer/joint.model")
    elif fault == "missing":
        shutil.rmtree(private / "final")
    else:
        flip(private / "final/model.safetensors")
    run = at(paths, tmp_path / "run")
    told = forked_world(
        2, lambda mine: train_here(CONFIG, run, device="cpu", init_from=private if mine == rank else first)
    )
    assert [ended.code for ended in told] == [1, 1], told
    reason = {
        "missing": "cannot be read",
        "flipped": "is not what was written",
        "another": "the hash of the weights is",
        "another vocabulary": "has another vocabulary",
    }[fault]
    assert all(reason in ended.told for ended in told), told
    assert not (run.run / "metrics.jsonl").exists()


# ── before there is a checkpoint ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("open_run", "OSError: [Errno 5] the disk is gone"),
        ("open_dataset", "OSError: [Errno 5] the disk is gone"),
        ("read_lines", "OSError: [Errno 5] the disk is gone"),
        ("load_tokenizers", "OSError: [Errno 5] the disk is gone"),
    ],
)
def test_what_fails_on_one_process_before_the_first_step_is_told_by_all(paths, tmp_path, broken, reason, rank):
    def fail(*arguments, **more):
        raise OSError(5, "the disk is gone")

    run = at(paths, tmp_path / "run")
    module = validation if broken == "read_lines" else loop
    told = train(CONFIG, run, lambda mine: setattr(module, broken, fail) if mine == rank else None)
    if broken == "open_run" and rank == 1:  # That one never opens it.
        assert [ended.code for ended in told] == [0, 0]
        return
    assert [ended.code for ended in told] == [1, 1]
    assert f"process {rank} of 2: {reason}" in told[1 - rank].told
    assert "lost contact" not in told[1 - rank].told


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", ["train.seed=2", "train.max_steps=20", "train.validate_every=7", "runtime.log_every=2"]
)
def test_processes_that_were_started_with_other_settings_are_refused(paths, tmp_path, change):
    run = at(paths, tmp_path / "run")
    told = forked_world(
        2, lambda rank: train_here(settings("runtime.log_every=1", *[change] * rank), run, device="cpu")
    )
    assert [ended.code for ended in told] == [1, 1]
    assert all("Start all processes with the same command" in ended.told for ended in told)


@pytest.mark.slow
def test_a_run_folder_that_only_one_process_sees_is_refused_before_the_first_step(paths, tmp_path):
    def process(rank: int) -> None:
        resume.NFS_DELAY = 0.5
        (tmp_path / f"node {rank}").mkdir()
        train_here(CONFIG, at(paths, tmp_path / f"node {rank}" / "run"), device="cpu")

    told = forked_world(2, process)
    assert [ended.code for ended in told] == [1, 1]
    assert f"process 1 of 2: cannot read {tmp_path}/node 1/run/provenance.json" in told[0].told
    assert all(ELSEWHERE in ended.told for ended in told)
    assert not (tmp_path / "node 0/run/metrics.jsonl").exists()


# ── the parts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_failure_in_a_block_of_all_is_raised_by_each_and_none_is_no_failure(tmp_path):
    def process(rank: int) -> None:
        with init_distributed("cpu") as world:
            for text in ("", "损坏\nline two"):
                try:
                    with world.all_or_none():
                        if rank == 1 and text:
                            raise NmtError(text)
                    outcome = "none"
                except NmtError as error:
                    outcome = f"{type(error).__name__}: {error}"
                with open(tmp_path / str(rank), "a", encoding="utf-8") as stream:
                    stream.write(json.dumps(outcome) + "\n")

    assert [ended.code for ended in forked_world(3, process)] == [0, 0, 0]
    told = [[json.loads(line) for line in (tmp_path / str(rank)).read_text().split("\n")[:-1]] for rank in range(3)]
    assert [one for one, _ in told] == ["none"] * 3
    other = "LostContact: process 1 of 3: 损坏\nline two"
    assert [two for _, two in told] == [other, "NmtError: 损坏\nline two", other]


class Rank(World):
    """A process whose neighbours' facts are given."""

    def gather(self, data: bytes) -> list[bytes]:
        return [data, *self.control]


@pytest.mark.parametrize(
    ("others", "problems"),
    [
        ([{"step": "3", "hash": "ab"}] * 3, []),
        (
            [{"step": "3", "hash": "ab"}, {"step": "2", "hash": "ab"}],
            ["step is 3 on process 0, but 2 on process 2 of 3"],
        ),
        (
            [{"step": "1", "hash": "xy"}, {"step": "3", "hash": "xy"}],
            [
                "step is 3 on process 0, but 1 on process 1 of 3",
                "hash is ab on process 0, but xy on process 1 of 3",
                "hash is ab on process 0, but xy on process 2 of 3",
            ],
        ),
    ],
)
def test_every_process_that_differs_is_named_with_what_differs(others, problems):
    world = Rank(0, len(others) + 1, torch.device("cpu"), [json.dumps(facts).encode() for facts in others])
    if not problems:
        world.require_equal({"step": "3", "hash": "ab"}, "Then this.")
        return
    with pytest.raises(NmtError) as told:
        world.require_equal({"step": "3", "hash": "ab"}, "Then this.")
    assert str(told.value).split("\n") == [*problems, "Then this."]
    assert not isinstance(told.value, LostContact)


def test_a_digest_sees_every_bit_name_type_and_shape_and_not_the_layout():
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(0.0), "c": torch.zeros(0)}
    same = {"c": torch.zeros(0), "a": torch.arange(6.0).reshape(2, 3).T.contiguous().T, "b": torch.tensor(0.0)}
    assert checkpoint.digest(tensors) == checkpoint.digest(same)
    others = [
        tensors | {"b": torch.tensor(-0.0)},
        tensors | {"b": torch.tensor(1e-45)},
        tensors | {"b": torch.tensor(0)},
        tensors | {"b": torch.zeros(1)},
        tensors | {"a": tensors["a"].reshape(3, 2)},
        tensors | {"a": tensors["a"].flip(0)},
        {"a": tensors["a"], "d": tensors["b"], "c": tensors["c"]},
        {"a": tensors["a"], "b": tensors["b"]},
    ]
    found = [checkpoint.digest(other) for other in [tensors, *others]]
    assert len(set(found)) == len(found)
    assert checkpoint.digest({"x": torch.zeros(3, dtype=torch.bfloat16)}) != checkpoint.digest(
        {"x": torch.zeros(3, dtype=torch.float16)}
    )


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_training_set_is_hashed_once_and_by_one_process_of_a_machine(paths, tmp_path, monkeypatch, local_rank):
    honest, hashed = dataset.sha256_of, []

    def counting(path: Path) -> str:
        hashed.append(path.name)
        return honest(path)

    monkeypatch.setattr(dataset, "sha256_of", counting)
    loop.train_model(settings("train.max_steps=2"), at(paths, tmp_path / "run"), replace(ALONE, local_rank=local_rank))
    files = ["en.ids", "en.offsets", "zh.ids", "zh.offsets", "rows"]
    assert sorted(hashed) == (
        [] if local_rank else sorted(f"{split}.{file}" for split in ("train", "dev") for file in files)
    )
    assert weights(tmp_path / "run", 2)
