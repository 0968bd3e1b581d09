"""The plan against the model itself, the paper's numbers, work counted by hand, and what autograd really keeps."""

import json
import math
from pathlib import Path

import pytest
import torch

from nmt import plan
from nmt.config import Config, ModelConfig, load
from nmt.model import Transformer
from nmt.optimizer import learning_rate
from nmt.plan import Data, activation_bytes, cpu_warning, make_plan, peak_rate, plan_lines
from nmt.sizes import parameters, training_flops

BASE = ModelConfig()
BIG = ModelConfig(d_model=1024, d_ff=4096, heads=16)
SMALL = ModelConfig(layers=3, d_model=256, d_ff=1024, heads=4)

CMN = Data(pairs=28_441, src_tokens=295_000, tgt_tokens=232_000, longest=80, updates=12, vocab=(8000, 8000), exact=True)


@pytest.mark.parametrize(
    ("model", "vocab", "millions"), [(BASE, 37_000, 63.1), (BIG, 37_000, 214.2), (BASE, 8000, 48.2), (BIG, 8000, 184.5)]
)
def test_parameters_are_those_of_the_paper_s_models(model: ModelConfig, vocab: int, millions: float) -> None:
    assert sum(parameters(model, vocab).values()) / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "pre", "norm_kind": "rms", "activation": "swiglu", "position": "rope"},
        {"position": "learned", "max_positions": 50, "decoder_layers": 1, "activation": "gelu"},
        {"kv_heads": 2, "norm": "pre"},
    ],
)
@pytest.mark.parametrize("src_vocab", [None, 70])
def test_parameters_are_those_of_the_model_part_by_part(changes: dict[str, object], src_vocab: int | None) -> None:
    config = ModelConfig(**({"layers": 2, "d_model": 32, "d_ff": 48, "heads": 4} | changes))  # type: ignore[arg-type]
    model, found = Transformer(config, 100, src_vocab), parameters(config, 100, src_vocab)
    parts = dict.fromkeys(found, 0)
    for name, weight in model.named_parameters():
        part = name.split(".")[0]
        part = {"src_embedding": "embedding", "position": "positions"}.get(part, part.split("_")[0])
        parts[part] += weight.numel()
    assert parts == found


@pytest.mark.parametrize(("model", "millions"), [(SMALL, 22.0), (BASE, 143), (BIG, 551)])
def test_work_for_each_token_is_what_was_counted_by_hand(model: ModelConfig, millions: float) -> None:
    # 8,000 pieces, 9.65 source and 7.46 target tokens a pair.
    assert training_flops(model, 8000, 9.65, 7.46) / (9.65 + 7.46) / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.parametrize(
    "changes", [{}, {"norm": "pre", "activation": "swiglu"}, {"activation": "gelu", "dropout": 0.0}]
)
def test_activations_are_what_autograd_keeps(changes: dict[str, object]) -> None:
    config = ModelConfig(**({"layers": 2, "d_model": 64, "d_ff": 256, "heads": 4} | changes))  # type: ignore[arg-type]
    model = Transformer(config, 100)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(4, 100, (16, 24))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(ids, ids)
    assert hidden.requires_grad
    assert activation_bytes(config, ids.numel(), ids.numel(), 4) == pytest.approx(sum(kept.values()), rel=0.1)


@pytest.mark.parametrize(("width", "rate"), [(512, 6.99e-4), (1024, 4.94e-4)])
def test_the_peak_of_noam_is_the_paper_s(width: int, rate: float) -> None:
    assert peak_rate(load(None).optim, width) == pytest.approx(rate, rel=0.001)


@pytest.mark.parametrize("schedule", ["noam", "inverse_sqrt", "cosine", "constant"])
def test_the_peak_is_the_largest_rate_of_the_schedule(schedule: str) -> None:
    optim = load(
        None, [f"optim.schedule={schedule}", "optim.warmup_steps=30", "optim.max_steps=100", "optim.lr_factor=2"]
    ).optim
    assert peak_rate(optim, 64) == pytest.approx(max(learning_rate(step, optim, 64) for step in range(1, 101)))


def test_the_paper_s_training_is_called_too_long_for_cmn_and_a_recipe_is_named() -> None:
    plan = make_plan(Config(), CMN)
    assert plan["data"]["epochs"] == pytest.approx(100_000 / 12)
    told = plan_lines(plan)[-1]
    assert "8,333 epochs" in told
    assert "cmn" in told


def test_a_training_that_fits_is_not_called_too_long() -> None:
    config = load(None, ["optim.max_steps=1200"])
    assert not any("Too long" in line for line in plan_lines(make_plan(config, CMN)))


def test_without_data_the_plan_says_what_it_can() -> None:
    plan = make_plan(Config(), None)
    assert "data" not in plan
    assert any("48.2 M" in line for line in plan_lines(plan))


def test_every_recipe_can_be_planned() -> None:
    for path in sorted((Path(__file__).parent.parent / "configs").glob("*.yaml")):
        plan = make_plan(load(str(path)), CMN)
        assert plan["memory"]["total"] < 80 * 2**30, path.name
        assert math.isfinite(plan["work"]["flops"])
        assert plan_lines(plan)


# ── before a training on a CPU ──────────────────────────────────────────────────────────────────────────────────────


def write_meta(folder: Path, pairs: int) -> Path:
    counts = {"pairs": pairs, "dropped": 0, "en_tokens": 10 * pairs, "zh_tokens": 8 * pairs}
    meta = {"languages": ["en", "zh"], "vocab_size": [8000, 8000], "splits": {"train": counts}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def test_a_training_that_takes_a_cpu_days_is_warned_of_with_its_hours(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(plan, "has_gpu", lambda devices: False)
    monkeypatch.setattr(plan, "cores", lambda: 2)
    folder = write_meta(tmp_path, 30_000)
    said = cpu_warning(load("base"), folder, "auto")
    # 12 updates an epoch; work counted by hand: 6 FLOP a weight and token but for attention, which is short here.
    tokens = 100_000 / 12 * 30_000 * 18
    hours = tokens * 143e6 / (2 * 40e9) / 3600
    assert said is not None
    assert said.startswith("100,000 steps (8,333 epochs) will take about ")
    told = float(said.split("about ")[1].split(" hours")[0].replace(",", ""))
    assert told == pytest.approx(hours, rel=0.02)
    assert "2 cores" in said
    monkeypatch.setattr(plan, "cores", lambda: 8)
    fewer = cpu_warning(load("base"), folder, "cpu")
    assert fewer is not None
    assert float(fewer.split("about ")[1].split(" hours")[0].replace(",", "")) == pytest.approx(told / 4, abs=1)


def test_a_short_training_or_one_on_a_gpu_is_not_warned_of(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(plan, "has_gpu", lambda devices: False)
    monkeypatch.setattr(plan, "cores", lambda: 2)
    folder = write_meta(tmp_path, 30_000)
    assert cpu_warning(load("demo"), folder, "cpu") is None
    assert cpu_warning(load("cmn-small"), folder, "cpu") is None
    assert cpu_warning(load("base"), folder, "cuda:1") is None
    assert cpu_warning(load("base"), folder, "mps") is None
    monkeypatch.setattr(plan, "has_gpu", lambda devices: True)
    assert cpu_warning(load("base"), folder, "auto") is None
    assert cpu_warning(load("base"), folder, "cpu") is not None
    for content in ("", "[]", "{}", '{"languages": ["en", "zh"], "vocab_size": [1, 2], "splits": {"train": {}}}'):
        (tmp_path / "meta.json").write_text(content)
        assert cpu_warning(load("base"), tmp_path, "cpu") is None
