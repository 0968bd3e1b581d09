"""Checkpoints are whole or not there, and a damaged one is never used."""

import json

import pytest
import torch

from nmt import checkpoint
from nmt.config import Config, ModelConfig, OptimConfig
from nmt.errors import CheckpointError
from nmt.model import Transformer
from nmt.optimizer import build_optimizer, set_learning_rate

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


DAMAGE = {
    "a flipped byte": lambda c: flip(c / "model.safetensors"),
    "a cut file": lambda c: (c / "model.safetensors").write_bytes((c / "model.safetensors").read_bytes()[:-1]),
    "an empty file": lambda c: (c / "state.json").write_bytes(b""),
    "a missing file": lambda c: (c / "state.json").unlink(),
    "an empty manifest": lambda c: (c / "manifest.json").write_text(""),
    "a manifest that names nothing": lambda c: (c / "manifest.json").write_text("{}"),
    "a manifest that names a file elsewhere": lambda c: (c / "manifest.json").write_text(
        json.dumps({"model.safetensors": "", "state.json": "", "../x": ""})
    ),
}


def flip(path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-10] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, damage, caplog):
    for step in (10, 20):
        checkpoint.save(checkpoint.step_folder(tmp_path, step), weights(step), {"step": step})
    damage(checkpoint.step_folder(tmp_path, 20))
    assert checkpoint.newest(tmp_path) == checkpoint.step_folder(tmp_path, 10)
    assert "step-00000020" in caplog.text
    with pytest.raises(CheckpointError):
        checkpoint.load(checkpoint.step_folder(tmp_path, 20))
    damage(checkpoint.step_folder(tmp_path, 10))
    with pytest.raises(CheckpointError, match="start over with --fresh"):
        checkpoint.newest(tmp_path)


def test_newest_goes_by_step_and_old_ones_are_pruned(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    for step in (900, 1000, 20):
        checkpoint.save(checkpoint.step_folder(tmp_path, step), weights(), {"step": step})
    assert checkpoint.newest(tmp_path).name == "step-00001000"
    checkpoint.prune(tmp_path, 2, 10)
    assert [path.name for path in checkpoint.saved_steps(tmp_path)] == ["step-00000900", "step-00001000"]


@pytest.mark.parametrize(("keep", "left"), [(1, [12]), (2, [10, 12]), (3, [5, 10, 12]), (9, [5, 10, 12])])
def test_a_checkpoint_between_the_intervals_goes_when_a_newer_one_is_there(tmp_path, keep, left):
    for step in (5, 7, 10, 12):
        checkpoint.save(checkpoint.step_folder(tmp_path, step), weights(), {"step": step})
    checkpoint.prune(tmp_path, keep, 5)
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
