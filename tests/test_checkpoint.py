"""Checkpoints are whole or not there, and a damaged one is never used."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nmt.config import Config, ModelConfig, OptimConfig
from nmt.errors import CheckpointError
from nmt.model.transformer import Transformer
from nmt.runs import checkpoint
from nmt.training.optimizer import build_optimizer, set_learning_rate

CONFIG = Config(model=ModelConfig(layers=1, d_model=16, d_ff=16, heads=2))


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return Transformer(CONFIG.model, 30).state_dict()


def test_what_is_saved_comes_back_equal(tmp_path):
    checkpoint.save(tmp_path / "c", weights(), {"step": 3}, {"a.step": torch.tensor(4.0)})
    loaded, state = checkpoint.load(tmp_path / "c")
    assert state == {"step": 3}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights().items())
    assert checkpoint.load_optimizer(tmp_path / "c")["a.step"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    model = checkpoint.build_model(CONFIG, loaded)
    assert not model.training


def test_saving_again_replaces_the_folder_as_a_whole(tmp_path):
    checkpoint.save(tmp_path / "c", weights(), {"step": 1}, {"x.y": torch.zeros(1)})
    checkpoint.save(tmp_path / "c", weights(1), {"step": 2})
    assert checkpoint.load(tmp_path / "c")[1] == {"step": 2}
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "state.json",
    ]


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def rewrite(path: Path, value: object) -> None:
    """Other content, and a manifest that agrees with it."""
    if isinstance(value, dict) and path.suffix == ".safetensors":
        save_file(value, path)
    else:
        path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    hashes = {p.name: sha256(p.read_bytes()).hexdigest() for p in path.parent.iterdir() if p.name != "manifest.json"}
    (path.parent / "manifest.json").write_text(json.dumps(hashes))


FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")

DAMAGE = {
    **{(name, f"cut to {size}"): partial(lambda c, name, size: cut(c / name, size), name=name, size=size)
       for name in FILES for size in (0, 10, 0.5, -2 if name == "manifest.json" else -1)},
    **{(name, f"byte {at} flipped"): partial(lambda c, name, at: flip(c / name, at), name=name, at=at)
       for name in FILES[:3] for at in (0, 8, -10)},
    **{(name, "missing"): partial(lambda c, name: (c / name).unlink(), name=name) for name in FILES},
    **{("manifest.json", f"is {text[:60]}"): partial(lambda c, text: (c / "manifest.json").write_text(text), text=text)
       for text in ("{}", "[]", "null", "3", '"x"', "[" * 100_000, '{"model.safetensors": 1, "state.json": null}',
                    '{"model.safetensors": "", "state.json": "", "../x": ""}',
                    '{"model.safetensors": "", "state.json": "", "/etc/hostname": ""}',
                    '{"model.safetensors": {}, "state.json": []}')},
    ("optimizer.safetensors", "is not in the manifest"): lambda c: forget(c, "optimizer.safetensors"),
    # From here on the manifest agrees, as if another program had written the checkpoint.
    **{("state.json", f"is {str(value)[:40]}"): partial(lambda c, value: rewrite(c / "state.json", value), value=value)
       for value in ([], None, 7, "x", {}, {"step": "20", "score": 1.0}, {"step": 20, "score": []},
                     {"step": 20.5, "score": None}, {"step": True, "score": None}, {"steps": 20},
                     {"step": 20, "score": 1.0, "more": 1}, b"[" * 100_000, b"\xff", b"20 20")},
    **{("model.safetensors", name): partial(lambda c, change: rewrite(c / "model.safetensors", change()), change=change)
       for name, change in {
           "has another dtype": lambda: {name: tensor.half() for name, tensor in weights().items()},
           "has another shape": lambda: weights() | {"embedding.weight": torch.zeros(31, 16)},
           "has another name": lambda: weights() | {"more": torch.zeros(1)},
           "lacks a name": lambda: dict(list(weights().items())[1:]),
           "is empty": dict,
       }.items()},
    **{("optimizer.safetensors", name):
       partial(lambda c, change: rewrite(c / "optimizer.safetensors", change(moments())), change=change)
       for name, change in {
           "has another dtype": lambda found: {name: tensor.double() for name, tensor in found.items()},
           "has another shape": lambda found: found | {"embedding.weight.exp_avg": torch.zeros(1)},
           "has another parameter": lambda found: found | {"more.exp_avg": torch.zeros(1)},
           "has another moment": lambda found: {name.replace("exp_avg_sq", "x"): t for name, t in found.items()},
           "lacks a moment": lambda found: {name: t for name, t in found.items() if name != "embedding.weight.step"},
           "is empty": lambda _: {},
       }.items()},
    ("model.safetensors", "is a pickle"): lambda c: rewrite(c / "model.safetensors", pickle.dumps({"a": 1})),
}  # fmt: skip


def cut(path: Path, size: float) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * size) if isinstance(size, float) else size])


def forget(folder: Path, name: str) -> None:
    hashes = json.loads((folder / "manifest.json").read_text())
    del hashes[name]
    (folder / "manifest.json").write_text(json.dumps(hashes))


@dataclass(frozen=True)
class Progress:
    """A state like that of a training."""

    step: int = 0
    score: float | None = None


def trained(seed: int) -> tuple[Transformer, torch.optim.Optimizer]:
    """A model after one step."""
    model = Transformer(CONFIG.model, 30)
    model.load_state_dict(weights(seed))
    optimizer = build_optimizer(model, OptimConfig())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed))
    optimizer.step()
    return model, optimizer


def moments(seed: int = 1) -> dict[str, torch.Tensor]:
    model, optimizer = trained(seed)
    return checkpoint.optimizer_tensors(optimizer, model)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("run")
    for step in (10, 20):
        state = {"step": step, "score": step / 10}
        checkpoint.save(checkpoint.step_folder(run, step), weights(step), state, moments(step))
    return run


@pytest.mark.parametrize(("name", "how"), DAMAGE, ids=lambda value: value)
def test_a_damaged_checkpoint_is_passed_over_with_one_warning_that_names_its_file(
    two_checkpoints, tmp_path, caplog, name, how
):
    run = tmp_path / "run"
    shutil.copytree(two_checkpoints, run)
    damage = DAMAGE[name, how]
    damage(checkpoint.step_folder(run, 20))
    model, optimizer = trained(3)
    folder, progress = checkpoint.load_newest(run, model, optimizer, Progress)
    assert (folder, progress) == (checkpoint.step_folder(run, 10), Progress(10, 1.0))
    assert all(torch.equal(tensor, weights(10)[name]) for name, tensor in model.state_dict().items())
    restored = checkpoint.optimizer_tensors(optimizer, model)
    assert all(torch.equal(tensor, restored[name]) for name, tensor in moments(10).items())
    (warning,) = [record.getMessage() for record in caplog.records]
    assert str(checkpoint.step_folder(run, 20) / name) in warning
    assert len(warning) < 700

    damage(checkpoint.step_folder(run, 10))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="start over with --fresh"):
        checkpoint.load_newest(run, model, optimizer, Progress)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("step", [10, 20])
def test_files_that_nothing_reads_do_not_make_a_checkpoint_damaged(two_checkpoints, tmp_path, caplog, step):
    shutil.copytree(two_checkpoints, tmp_path / "run")
    (checkpoint.step_folder(tmp_path / "run", step) / "notes.txt").write_text("the good one")
    assert checkpoint.newest(tmp_path / "run").name == "step-00000020"
    assert caplog.text == ""


def test_every_parameter_of_every_road_has_moments_after_a_step():
    # What `load_newest` relies on: a parameter without them would make every checkpoint damaged.
    roads = ({}, {"norm_order": "pre", "norm_type": "rms"}, {"activation": "swiglu", "position": "rope", "kv_heads": 1},
             {"activation": "gelu", "position": "learned", "decoder_layers": 2})  # fmt: skip
    for road in roads:
        model = Transformer(replace(CONFIG.model, **road), 30, 20)
        model.logits(model(torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long))).sum().backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_newest_goes_by_step_and_old_ones_are_pruned(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    for step in (900, 1000, 20):
        checkpoint.save(checkpoint.step_folder(tmp_path, step), weights(), {"step": step})
    assert checkpoint.newest(tmp_path).name == "step-00001000"
    for seconds, step in enumerate((1000, 900, 20)):  # A clock that was set back.
        os.utime(checkpoint.step_folder(tmp_path, step), (seconds, seconds))
    assert checkpoint.newest(tmp_path).name == "step-00001000"
    checkpoint.prune(tmp_path, 2, 10, 1000)
    assert [path.name for path in checkpoint.saved_steps(tmp_path)] == ["step-00000900", "step-00001000"]


def test_a_damaged_later_checkpoint_does_not_push_out_the_one_that_was_just_saved(tmp_path):
    for step in (10, 20):
        checkpoint.save(checkpoint.step_folder(tmp_path, step), weights(), {"step": step})
    flip(checkpoint.step_folder(tmp_path, 20) / "model.safetensors", -1)
    checkpoint.save(checkpoint.step_folder(tmp_path, 15), weights(), {"step": 15})
    checkpoint.prune(tmp_path, 1, 5, 15)
    assert [path.name for path in checkpoint.saved_steps(tmp_path)] == ["step-00000015"]


@pytest.mark.parametrize(("keep", "left"), [(1, [12]), (2, [10, 12]), (3, [5, 10, 12]), (9, [5, 10, 12])])
def test_a_checkpoint_between_the_intervals_goes_when_a_newer_one_is_there(tmp_path, keep, left):
    for step in (5, 7, 10, 12):
        checkpoint.save(checkpoint.step_folder(tmp_path, step), weights(), {"step": step})
    checkpoint.prune(tmp_path, keep, 5, 12)
    assert [int(path.name[5:]) for path in checkpoint.saved_steps(tmp_path)] == left


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "c", weights(), {"step": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(tmp_path / "c", weights(1), {"step": 2})
    assert checkpoint.load(tmp_path / "c")[1] == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_averaging_equals_the_plain_mean_and_keeps_equal_weights():
    one, two = weights(1), weights(2)
    mean = checkpoint.average([one, two])
    assert all(torch.allclose(mean[name], (one[name] + two[name]) / 2, atol=1e-7) for name in one)
    assert all(torch.equal(tensor, one[name]) for name, tensor in checkpoint.average([one, one, one]).items())
    with pytest.raises(CheckpointError, match="not of one model"):
        checkpoint.average([one, {"other": torch.zeros(1)}])


@pytest.mark.parametrize("count", [1, 2, 5, 20, 40])
def test_an_average_is_that_of_all_at_once_in_float64_bit_for_bit(tmp_path, count):
    many = [weights(seed) for seed in range(count)]
    for number, one in enumerate(many):
        checkpoint.save(tmp_path / f"{number}", one, {"step": 1})
    mean = checkpoint.average_folders([tmp_path / f"{number}" for number in range(count)])
    for name, tensor in mean.items():
        plain = torch.stack([one[name].double() for one in many]).mean(0).to(tensor.dtype)
        assert torch.equal(tensor, plain), name
    assert mean.keys() == many[0].keys()


def test_averaging_changes_nothing_that_it_is_given_and_needs_equal_names_shapes_and_types():
    one = {"w": torch.ones(3, dtype=torch.float64)}
    assert checkpoint.average([one, {"w": torch.full((3,), 3.0, dtype=torch.float64)}])["w"].tolist() == [2.0] * 3
    assert one["w"].tolist() == [1.0] * 3
    for other in ({}, {"w": torch.ones(2, dtype=torch.float64)}, {"w": torch.ones(3)}, {**one, "x": torch.ones(1)}):
        with pytest.raises(CheckpointError, match="not of one model"):
            checkpoint.average([one, other])


MEMORY = """
import sys, torch
from pathlib import Path
from nmt.runs import checkpoint
def now(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])
folders = sorted(Path(sys.argv[1]).iterdir())[: int(sys.argv[2])]
torch.ones(1) + torch.ones(1)
checkpoint.average_folders(folders[:1])
Path("/proc/self/clear_refs").write_text("5")
before = now("VmRSS")
assert all(checkpoint.fault(folder) is None for folder in folders)
mean = checkpoint.average_folders(folders)
print((now("VmHWM") - before) * 1024 / sum(tensor.nbytes for tensor in mean.values()))
"""


def test_an_average_holds_no_more_than_three_copies_of_the_weights_however_many_checkpoints_there_are(tmp_path):
    for number in range(8):
        big = {f"{i}": torch.full((1 << 20,), float(number)) for i in range(16)}  # 64 MiB
        checkpoint.save(tmp_path / f"{number}", big, {"step": 1})
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    for count in ("2", "8"):
        ended = subprocess.run([*command, count], capture_output=True, encoding="utf-8", check=True, timeout=120)
        # Two copies are the sum in float64, one the pages of the file that is mapped, which the system may take back.
        assert 2 < float(ended.stdout) < 3.5


def test_the_optimizer_goes_on_as_if_it_had_not_stopped():
    def steps(model, optimizer, seeds):
        for seed in seeds:
            torch.manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            set_learning_rate(optimizer, 0.01)
            optimizer.step()

    whole = Transformer(CONFIG.model, 30)
    whole.load_state_dict(weights())
    optimizer = build_optimizer(whole, OptimConfig())
    steps(whole, optimizer, range(3))
    later = Transformer(CONFIG.model, 30)
    later.load_state_dict(whole.state_dict())
    restored = build_optimizer(later, OptimConfig())
    tensors = checkpoint.optimizer_tensors(optimizer, whole)
    checkpoint.restore_optimizer(restored, later, {name: tensor.clone() for name, tensor in tensors.items()})
    steps(whole, optimizer, (7, 8))
    steps(later, restored, (7, 8))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), later.parameters(), strict=True))


def test_weights_that_do_not_fit_are_told_plainly(tmp_path):
    with pytest.raises(CheckpointError, match="do not fit"):
        checkpoint.build_model(Config(), weights())
    with pytest.raises(CheckpointError, match="no final model"):
        checkpoint.load_model(tmp_path, CONFIG)
