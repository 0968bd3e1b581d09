"""The plan against the model itself, the paper's numbers, work counted by hand, and what autograd really keeps."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from nmt.cli import app
from nmt.config import Config, ModelConfig, TranslateConfig, load
from nmt.distributed import launcher
from nmt.distributed.world import World, choose_device
from nmt.model import loss
from nmt.model.cached_decoder import CachedDecoder
from nmt.model.flops import parameters, peak_flops, training_flops
from nmt.model.transformer import Transformer
from nmt.pipeline import stages
from nmt.runs.identity import TrainPaths
from nmt.training import loop, plan
from nmt.training.optimizer import learning_rate
from nmt.training.plan import Data, activation_bytes, cache_bytes, cpu_warning, make_plan, peak_rate, plan_lines
from nmt.training.step import Trainer

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
        {"norm_order": "pre", "norm_type": "rms", "activation": "swiglu", "position": "rope"},
        {"position": "learned", "max_positions": 50, "decoder_layers": 1, "activation": "gelu"},
        {"kv_heads": 2, "norm_order": "pre"},
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
    "changes", [{}, {"norm_order": "pre", "activation": "swiglu"}, {"activation": "gelu", "dropout": 0.0}]
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
    assert activation_bytes(config, ids.numel(), ids.numel(), half=False) == pytest.approx(sum(kept.values()), rel=0.05)


@pytest.mark.parametrize(("width", "rate"), [(512, 6.99e-4), (1024, 4.94e-4)])
def test_the_peak_of_noam_is_the_paper_s(width: int, rate: float) -> None:
    assert peak_rate(load(None).optim, width) == pytest.approx(rate, rel=0.001)


@pytest.mark.parametrize("schedule", ["noam", "inverse_sqrt", "cosine", "constant"])
def test_the_peak_is_the_largest_rate_of_the_schedule(schedule: str) -> None:
    optim = load(
        None, [f"optim.schedule={schedule}", "optim.warmup_steps=30", "train.max_steps=100", "optim.lr_factor=2"]
    ).optim
    assert peak_rate(optim, 64) == pytest.approx(max(learning_rate(step, optim, 100, 64) for step in range(1, 101)))


def test_the_paper_s_training_is_called_too_long_for_cmn_and_a_recipe_is_named() -> None:
    plan = make_plan(Config(), CMN)
    assert plan["data"]["epochs"] == pytest.approx(100_000 / 12)
    told = plan_lines(plan)[-1]
    assert "8,333 epochs" in told
    assert "cmn" in told


def test_a_training_that_fits_is_not_called_too_long() -> None:
    config = load(None, ["train.max_steps=1200"])
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


class Peak(TorchDispatchMode):
    """The most bytes of tensors that lived at one time but for `known` ones, as every operation is watched."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.live = {StorageWeakRef(tensor.untyped_storage()): 0 for tensor in known}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.live.setdefault(StorageWeakRef(storage), storage.nbytes())
        self.live = {ref: size for ref, size in self.live.items() if not ref.expired()}
        self.most = max(self.most, sum(self.live.values()))
        return result


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("changes", "vocab", "rows"),
    [
        ([], 100, 256),
        ([], 4000, 64),  # The scores are most of it.
        ([], 4000, 100_000),  # All at once, as a GPU may have them.
        (["model.d_model=128", "model.d_ff=512", "model.layers=4"], 100, 64),
        (["model.norm_order=pre", "model.norm_type=rms", "model.activation=swiglu", "model.position=rope"], 100, 64),
        (["model.attention_dropout=0.1"], 100, 64),
    ],
)
def test_the_memory_of_a_training_is_what_lives_in_a_pass(
    monkeypatch: pytest.MonkeyPatch, precision: str, changes: list[str], vocab: int, rows: int
) -> None:
    monkeypatch.setitem(loss.CHUNK, "cpu", rows)
    sentences, length = 16, 24
    tokens = sentences * length
    small = ["model.layers=2", "model.d_model=64", "model.d_ff=256", "model.heads=4", f"runtime.device_tokens={tokens}"]
    config = load(None, [*small, f"bpe.vocab_size={max(vocab, 300)}", f"train.precision={precision}", *changes])
    data = dataclasses.replace(CMN, longest=length, vocab=(vocab, vocab))
    memory = make_plan(config, data)["memory"]
    trainer = Trainer.build(config, World(0, 1, torch.device("cpu")), (vocab, vocab))
    ids = torch.randint(4, vocab, (sentences, length))
    weights = list(trainer.model.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)  # As while an update has several micro-batches.
    known = [*weights, *(weight.grad for weight in weights if weight.grad is not None)]
    with Peak(known) as peak:
        with trainer.precision():
            total, _ = trainer.parallel(ids, ids, ids, torch.arange(tokens))
        total.backward()
    planned = memory["total"] - memory["weights_gradients_moments"]
    assert 0.9 * peak.most < planned < 1.2 * peak.most


@pytest.mark.parametrize(
    ("batch_tokens", "beam", "longest", "extra"), [(64, 4, 12, 20), (40, 2, 5, 3), (16, 1, 30, 10), (64, 4, 3, 60)]
)
def test_the_decoder_s_cache_is_at_most_what_a_search_ever_holds(
    batch_tokens: int, beam: int, longest: int, extra: int
) -> None:
    config = ModelConfig(layers=2, decoder_layers=3, d_model=32, d_ff=32, heads=4, kv_heads=2)
    translate = TranslateConfig(beam=beam, max_length_offset=extra)
    model, most = Transformer(config, 50).eval(), 0
    for length in range(2, longest + 1):
        sentences = max(1, batch_tokens // (length * beam))
        decoder = CachedDecoder.of(model, torch.full((sentences, length), 5), beam)
        held = [*decoder.cache_B2TWGK, *itertools.chain(*decoder.cross)]
        cross = sum(tensor.nbytes for tensor in itertools.chain(*decoder.cross))
        last = torch.full((sentences * beam,), 5)
        most = max(most, sum(tensor.nbytes for tensor in held))
        for _ in range(length + extra):
            before = decoder.cache_B2TWGK
            decoder.step(last)
            # While room is made, both stand, and what is put behind one layer's.
            copied = [] if decoder.cache_B2TWGK is before else [*before, before[0]]
            most = max(most, cross + sum(tensor.nbytes for tensor in (*decoder.cache_B2TWGK, *copied)))
    assert cache_bytes(config, longest, translate, batch_tokens, 4) == most


@settings(max_examples=200)
@given(
    batch_tokens=st.integers(1, 3000),
    beam=st.integers(1, 8),
    longest=st.integers(1, 400),
    extra=st.integers(0, 200),
)
def test_the_largest_cache_is_found_without_looking_at_every_length(
    batch_tokens: int, beam: int, longest: int, extra: int
) -> None:
    config = ModelConfig(layers=2, decoder_layers=3, d_model=32, d_ff=32, heads=4, kv_heads=2)
    translate = TranslateConfig(beam=beam, max_length_offset=extra)

    def held(length: int) -> int:
        sentences, room = max(1, batch_tokens // (length * beam)), 16
        while room < length + extra:
            room *= 2
        a_layer = sentences * beam * room
        made = (3 * a_layer // 2 + a_layer // 2) if room > 16 else 0
        return (3 * (a_layer + sentences * length) + made) * 2 * 2 * 8 * 4

    assert cache_bytes(config, longest, translate, batch_tokens, 4) == max(map(held, range(2, max(2, longest) + 1)))


@pytest.mark.parametrize("name", ["encode.max_tokens", "translate.max_length_offset", "translate.batch_tokens",
                                  "train.batch_tokens", "train.max_steps", "runtime.device_tokens"])  # fmt: skip
def test_how_long_a_plan_takes_does_not_depend_on_how_large_a_setting_is(name: str, tmp_path: Path) -> None:
    words = ["--set", f"{name}={2**31 - 1}", "--set", "encode.max_tokens=2147483647"]
    command = [sys.executable, "-m", "nmt", "plan", "-c", "base", *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=120)
    assert ended.returncode in (0, 2), ended.stderr


def test_a_gpu_holds_more_rows_of_scores_and_smaller_masks_than_a_cpu() -> None:
    changes = ["runtime.device_tokens=4096", "translate.batch_tokens=4096"]
    config = load(None, ["train.precision=bfloat16", "translate.precision=bfloat16", *changes])
    here, there = make_plan(config, CMN, "cpu"), make_plan(config, CMN, "cuda")
    # Twelve bytes for each further score, by hand.
    assert there["memory"]["loss"] - here["memory"]["loss"] == 12 * 8000 * (4096 - 256)
    assert there["memory"]["activations"] < here["memory"]["activations"]
    assert here["attention"]["decoder_cache"] == 2 * there["attention"]["decoder_cache"]
    assert any("on cuda: " in line for line in plan_lines(there))
    assert there["memory"]["half_precision_copies"] == 2 * sum(there["parameters"][k] for k in ("encoder", "decoder"))
    assert make_plan(Config(), CMN)["memory"]["half_precision_copies"] == 0


@pytest.mark.parametrize(
    ("name", "tera", "half_only"),
    [
        ("NVIDIA H100 80GB HBM3", 989, False),
        ("NVIDIA H100 PCIe", 756, False),
        ("NVIDIA H100 NVL", 835, False),
        ("NVIDIA H200", 989, False),
        ("NVIDIA H20", 148, False),
        ("NVIDIA H20-3e", 148, False),
        ("NVIDIA GH200 480GB", 989, False),
        ("NVIDIA H800", 989, False),
        ("NVIDIA H800 PCIe", 756, False),
        ("NVIDIA A800-SXM4-80GB", 312, False),
        ("NVIDIA A800 80GB PCIe", 312, False),
        ("NVIDIA A100-SXM4-40GB", 312, False),
        ("NVIDIA B200", 2250, False),
        ("NVIDIA GB200", 2500, False),
        ("NVIDIA L40S", 362, False),
        ("NVIDIA A10G", 70, False),
        ("NVIDIA GeForce RTX 4090", 165, False),
        ("Tesla V100-SXM2-32GB", 125, True),
        ("Tesla V100-PCIE-16GB", 112, True),
        ("Tesla T4", 65, True),
        # No guess is better than a wrong one.
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, False),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, False),
        ("NVIDIA GeForce RTX 4090 D", None, False),
        ("NVIDIA A1000", None, False),
        ("NVIDIA H2000", None, False),
        ("NVIDIA T400", None, False),
        ("NVIDIA A10", None, False),
        ("NVIDIA XB200", None, False),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_data_sheet_by_its_whole_name(
    name: str, tera: float | None, half_only: bool
) -> None:
    peak = None if tera is None else pytest.approx(tera * 1e12)
    assert peak_flops(name, "float16") == peak
    assert peak_flops(name, "bfloat16") == (None if half_only else peak)
    assert peak_flops(name, "float32") is None


@pytest.mark.parametrize(("device", "kind"), [("auto", None), ("cpu", "cpu"), ("cuda:3", "cuda"), ("mps", "mps")])
def test_a_plan_is_for_the_kind_of_device_that_is_named_whether_it_is_here_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, kind: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plan", "-c", "demo", "--device", device, "--json"])
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["device"] == (kind or choose_device("auto").type)


def test_a_device_that_there_is_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["plan", "-c", "demo", "--device", "tpu"]).exit_code != 0


# ── before a training on a CPU ──────────────────────────────────────────────────────────────────────────────────────


def write_meta(folder: Path, pairs: int) -> Path:
    counts = {"pairs": pairs, "dropped": 0, "en_tokens": 10 * pairs, "zh_tokens": 8 * pairs}
    meta = {"languages": ["en", "zh"], "vocab_size": [8000, 8000], "splits": {"train": counts}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def test_a_training_that_takes_a_cpu_days_is_warned_of_with_its_hours(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(launcher, "has_gpu", lambda devices: False)
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
    monkeypatch.setattr(launcher, "has_gpu", lambda devices: False)
    monkeypatch.setattr(plan, "cores", lambda: 2)
    folder = write_meta(tmp_path, 30_000)
    assert cpu_warning(load("demo"), folder, "cpu") is None
    assert cpu_warning(load("cmn-small"), folder, "cpu") is None
    assert cpu_warning(load("base"), folder, "cuda:1") is None
    assert cpu_warning(load("base"), folder, "mps") is None
    monkeypatch.setattr(launcher, "has_gpu", lambda devices: True)
    assert cpu_warning(load("base"), folder, "auto") is None
    assert cpu_warning(load("base"), folder, "cpu") is not None
    for content in ("", "[]", "{}", '{"languages": ["en", "zh"], "vocab_size": [1, 2], "splits": {"train": {}}}'):
        (tmp_path / "meta.json").write_text(content)
        assert cpu_warning(load("base"), tmp_path, "cpu") is None


@pytest.mark.parametrize(("rank", "warnings"), [("0", 1), ("1", 0)])
def test_the_warning_comes_once_and_from_the_process_that_trains(tmp_path, monkeypatch, caplog, rank, warnings) -> None:
    monkeypatch.setattr(plan, "cpu_warning", lambda config, encode, device: "long")
    monkeypatch.setattr(loop, "train_model", lambda *_, **options: None)
    monkeypatch.setenv("RANK", rank)
    paths = TrainPaths(clean=tmp_path, bpe=tmp_path, encode=tmp_path, run=tmp_path)
    (tmp_path / "dev.zh").write_text("你好。\n", encoding="utf-8")
    # As the process does that starts others.
    stages._train(load("demo"), paths, lambda config, paths: None, tmp_path)
    assert not caplog.messages
    stages.train_here(load("demo"), paths, device="cpu")
    assert caplog.messages == ["train: long"] * warnings
