"""What `auto` means by device, against memory counted by hand; and that a run keeps what it meant when it began."""

import json
import logging
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nmt.config import Config, load, of_kind
from nmt.data.tokenizer import load_tokenizers
from nmt.decoding import translator as translation
from nmt.distributed import gpu_defaults
from nmt.distributed import world as distributed
from nmt.distributed.gpu_defaults import Gpu
from nmt.distributed.world import World, choose_device, gpu_of
from nmt.errors import ConfigError
from nmt.runs import checkpoint
from nmt.runs.identity import as_trained, read_identity, trained_precision
from nmt.runs.listing import describe_run
from nmt.runs.run_dir import RunDir, read_config
from nmt.training import resume, validation
from nmt.training.loop import train_model
from nmt.training.plan import cache_bytes, make_plan, plan_lines
from nmt.training.step import Trainer, micro_batches
from test_step import of_lengths
from test_translation import make, tokenizer, words  # noqa: F401
from tiny import ALONE, as_on_a_gpu, at, equal, final, settings, state

GIB = 2**30
H200, OLD = Gpu(141 * GIB, bfloat16=True), Gpu(16 * GIB, bfloat16=False)
CONFIGS = Path(__file__).parent.parent / "configs"


# ── what it means ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("gpu", "meant"), [(None, "float32"), (OLD, "float32"), (H200, "bfloat16")])
def test_the_precision_is_bfloat16_on_a_gpu_that_has_it_alone_and_a_word_that_was_given_stays(gpu, meant):
    assert gpu_defaults.precision("auto", gpu) == meant
    assert {gpu_defaults.precision(word, gpu) for word in ("float32", "bfloat16", "float16")} == {
        "float32",
        "bfloat16",
        "float16",
    }


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_as_it_is_trains_in_float32_on_a_cpu_and_in_bfloat16_on_a_gpu(path):
    config = load(str(path))
    here, there = (gpu_defaults.for_training(config, gpu) for gpu in (None, H200))
    assert (here.train.precision, here.runtime.device_tokens) == ("float32", 4096)
    assert (there.train.precision, there.runtime.device_tokens) == ("bfloat16", "auto")
    for found in (here, there):  # All else is the recipe.
        again = replace(found.train, precision="auto"), replace(found.runtime, device_tokens="auto")
        assert replace(found, train=again[0], runtime=again[1]) == config


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize(
    ("lengths", "rounds"), [((24, 25, 26), {1}), ((9, 10, 29, 30), {1, 2}), ((5, 12, 26, 50), {1, 2})]
)
def test_a_process_has_its_share_of_an_update_in_one_or_two_micro_batches(processes, lengths, rounds):
    batch_tokens = load("base.yaml").train.batch_tokens
    # As many tokens of each length; the other side is up to a tenth shorter.
    src = [n for n in lengths for _ in range(batch_tokens // len(lengths) // n)]
    data = of_lengths(src, [n - i % (n // 10 + 1) for i, n in enumerate(src)])
    limit = gpu_defaults.device_tokens("auto", batch_tokens, processes, H200)
    world = SimpleNamespace(size=processes, device=torch.device("cuda"))
    trainer = SimpleNamespace(device_tokens=limit, world=world)
    assert len(micro_batches(trainer, data, np.arange(len(data)))) / processes in rounds


@pytest.mark.parametrize("recipe", ["base", "big", "base-modern", "cmn"])
@pytest.mark.parametrize("memory", [12, 24, 40, 80, 141])
@pytest.mark.parametrize("size", [2, 4])
def test_a_batch_of_everyday_sentences_has_a_cache_of_at_most_a_quarter_of_the_memory(recipe, memory, size):
    config = load(f"{recipe}.yaml")
    tokens = gpu_defaults.translate_tokens(config.translate, config.model, size, Gpu(memory * GIB, bfloat16=True))
    assert tokens & (tokens - 1) == 0

    def cache(tokens: int) -> float:
        """By hand: rows of 25 + 50 tokens have room for 128; half of it again while 128 are made of 64."""
        layers = config.model.decoder_layers or config.model.layers
        return tokens / 25 * 128 * 1.5 * layers * 2 * config.model.d_model * size

    assert cache(tokens) <= memory * GIB / 4 or tokens == 4096
    assert cache(2 * tokens) > memory * GIB / 4 or tokens == 2**18


def test_translation_keeps_its_batches_on_a_cpu_and_a_number_that_was_given_anywhere():
    config = load("base.yaml")
    assert gpu_defaults.translate_tokens(config.translate, config.model, 4, None) == 4096
    given = replace(config.translate, batch_tokens=777)
    assert gpu_defaults.translate_tokens(given, config.model, 4, H200) == 777
    assert gpu_defaults.translate_tokens(config.translate, config.model, 4, Gpu(80 * GIB, bfloat16=True)) == 65_536


def test_a_gpu_is_asked_for_its_memory_and_for_bfloat16_without_emulation(monkeypatch):
    def supported(including_emulation=True):
        return including_emulation

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=5))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert gpu_of(torch.device("cuda", 1)) == Gpu(5, bfloat16=False)
    assert gpu_of(torch.device("cpu")) is None
    assert gpu_of(torch.device("mps")) is None


def test_float32_on_a_gpu_is_float32_whatever_was_set_before(monkeypatch):
    """A container may set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which torch reads when it is loaded."""
    for name, answer in (("is_available", lambda: True), ("device_count", lambda: 1), ("set_device", lambda _: None)):
        monkeypatch.setattr(distributed.torch.cuda, name, answer)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        choose_device("cpu")
        assert torch.get_float32_matmul_precision() == "high", "nothing of another device"
        choose_device("cuda")
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.matmul.allow_tf32 is False
    finally:
        torch.set_float32_matmul_precision(before)


# ── a run keeps it ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def begun(paths, tmp_path_factory) -> Path:
    """A run of six steps on a CPU, whose settings say `auto`."""
    run = tmp_path_factory.mktemp("begun") / "run"
    train_model(settings("train.max_steps=6", "runtime.device_tokens=auto"), at(paths, run), ALONE)
    return run


def copy_of(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder / "run")
    return folder / "run"


def test_a_run_says_what_auto_became(begun, caplog):
    assert read_identity(begun)["settings"]["train"]["precision"] == "float32"
    assert json.loads((begun / "numerics.json").read_text())["runtime"]["device_tokens"] == 4096
    assert read_config(begun).train.precision == "auto", "the settings are as they were given"
    assert as_trained(read_config(begun), begun).train.precision == "float32"
    assert describe_run(RunDir(begun))["precision"] == "float32"
    assert state(begun)["device_tokens"] == 0, "nothing was tried"


def test_the_first_line_names_the_precision_that_auto_became(paths, tmp_path, monkeypatch, caplog):
    as_on_a_gpu(monkeypatch, bfloat16=True)
    with caplog.at_level(logging.INFO):
        train_model(settings("train.max_steps=2"), at(paths, tmp_path / "run"), ALONE)
    assert "on cpu, bfloat16, 2 updates" in caplog.text
    assert read_identity(tmp_path / "run")["settings"]["train"]["precision"] == "bfloat16"


def test_a_run_that_is_resumed_on_another_device_keeps_the_precision_that_it_began_with(
    paths, begun, tmp_path, monkeypatch, caplog
):
    run, whole = copy_of(begun, tmp_path), tmp_path / "whole"
    changes = ("train.max_steps=9", "runtime.device_tokens=4096")
    train_model(settings("train.precision=float32", *changes), at(paths, whole), ALONE)
    as_on_a_gpu(monkeypatch, bfloat16=True)
    with caplog.at_level(logging.INFO):
        train_model(settings(*changes), at(paths, run), ALONE)
    assert "train.precision stays float32, as the run was started with; auto is bfloat16 here" in caplog.text
    assert equal(final(run), final(whole))
    assert trained_precision(run) == "float32"
    train_model(settings(*changes), at(paths, run), ALONE, fresh=True)
    assert trained_precision(run) == "bfloat16", "what starts over has nothing to keep"


def test_a_word_for_auto_is_the_same_run_and_another_word_is_refused(paths, begun, tmp_path):
    run = copy_of(begun, tmp_path)
    train_model(settings("train.max_steps=7", "train.precision=float32"), at(paths, run), ALONE)
    with pytest.raises(ConfigError, match=r"train\.precision: float32 -> bfloat16"):
        train_model(settings("train.max_steps=8", "train.precision=bfloat16"), at(paths, run), ALONE)
    train_model(settings("train.max_steps=8", "train.precision=auto"), at(paths, run), ALONE)
    assert checkpoint.newest(run) == checkpoint.step_folder(run, 8)


def test_a_finished_run_of_before_auto_is_still_finished(paths, tmp_path, caplog):
    run = at(paths, tmp_path / "run")
    train_model(settings("train.precision=float32", "train.max_steps=4"), run, ALONE)
    before = {path: path.stat().st_mtime_ns for path in run.run.rglob("*") if path.name != "lock"}
    with caplog.at_level(logging.INFO):
        train_model(settings("train.max_steps=4"), run, ALONE)
    assert "is finished; nothing to do" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_every_process_takes_the_precision_of_the_first(monkeypatch, tmp_path):
    """On a machine with an older GPU beside a newer one, each would choose its own."""
    told = []

    class Two(World):
        def sum(self, values):
            told.append(list(values))
            return [2.0] if self.rank == 0 else [1.0]

        def gather(self, data):
            return [b"", b""]

    for rank, gpu in ((0, OLD), (1, H200)):
        monkeypatch.setattr(resume, "gpu_of", lambda device, gpu=gpu: gpu)
        found = resume.settle(Config(), tmp_path / "none", Two(rank, 2, torch.device("cpu")), fresh=False)
        assert found.train.precision == ("float16" if rank == 0 else "bfloat16"), "what all were told"
    assert told == [[0.0], [0.0]], "the first says float32, the others nothing"


def test_the_precision_is_of_the_result_and_the_rest_of_auto_is_numerics():
    kinds = {"train": "result", "runtime": "numerics", "translate": "numerics"}
    for name, setting in (("train", "precision"), ("runtime", "device_tokens"), ("translate", "batch_tokens")):
        assert of_kind(getattr(Config(), name), kinds[name])[setting] == "auto"


# ── translation ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Small:
    """A GPU that has room for so many sentences at once."""

    def __init__(self, sentences: int) -> None:
        self.sentences, self.tried = sentences, []

    def search(self, plain):
        def limited(translator, parts, options):
            self.tried.append(len(parts))
            if len(parts) > self.sentences:
                raise torch.OutOfMemoryError("no room")
            return plain(translator, parts, options)

        return limited


def test_what_does_not_fit_is_translated_in_halves_with_the_same_result(tokenizer, monkeypatch):  # noqa: F811
    lines = words(40)
    translator = make(tokenizer, beam=2, batch_tokens=10**6)
    translator.together = 1
    expected = translator.translate(lines)
    small = Small(11)
    plain = translation.Translator._search_together
    monkeypatch.setattr(translation.Translator, "_search_together", small.search(plain))
    assert translator.translate(lines) == expected
    assert small.tried == [40, 20, 10, 10, 20, 10, 10]
    small.sentences = 0
    with pytest.raises(torch.OutOfMemoryError):
        translator.translate(lines)


def test_what_was_computed_for_all_is_gone_before_the_halves_are_tried(tokenizer, monkeypatch):  # noqa: F811
    translator, held, alive = make(tokenizer, beam=2, batch_tokens=10**6), [], []
    translator.together = 1
    plain = translation.Translator._search_together

    def limited(translator, parts, options):
        alive.append(sum(ref() is not None for ref in held))
        cache = torch.empty(3)
        held.append(weakref.ref(cache))
        if len(parts) > 10:
            raise torch.OutOfMemoryError("no room")
        return plain(translator, parts, options)

    monkeypatch.setattr(translation.Translator, "_search_together", limited)
    translator.translate(words(40))
    assert len(alive) > 3
    assert set(alive) == {0}


def test_a_translator_asks_its_device_how_much_it_translates_at_once(tokenizer, monkeypatch):  # noqa: F811
    assert make(tokenizer, batch_tokens="auto").batch_tokens == 4096
    monkeypatch.setattr(translation, "gpu_of", lambda device: Gpu(2**20, bfloat16=True))
    found = make(tokenizer, batch_tokens="auto")
    assert found.batch_tokens == 4096, "never fewer than on a CPU"
    monkeypatch.setattr(translation, "gpu_of", lambda device: Gpu(2**36, bfloat16=True))
    assert make(tokenizer, batch_tokens="auto").batch_tokens == 2**18
    assert make(tokenizer, batch_tokens=99).batch_tokens == 99


def test_all_processes_translate_the_dev_set_in_the_batches_of_the_first(paths, monkeypatch):
    """GPUs of different sizes would make different batches, and each process a share of its own ones."""
    dev = validation.DevSet.load(settings(), paths, load_tokenizers(paths.bpe, "en", "zh"))
    trainer, made, said = Trainer.build(settings(), ALONE, (340, 340)), [], []

    class Second(World):
        def broadcast(self, values):
            said.append(list(values))
            return [123.0]

    class Made(translation.Translator):
        def translate(self, lines):
            made.append(self.batch_tokens)
            return ["" for _ in lines]

    monkeypatch.setattr(validation, "Translator", Made)
    monkeypatch.setattr(validation, "gpu_of", lambda device: H200)
    trainer = replace(trainer, world=Second(0, 1, torch.device("cpu")))
    validation.translate_dev(trainer, dev, 2)
    assert made == [123]
    assert said[0] == [2**18]


# ── the plan ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("recipe", ["base", "cmn-small"])
def test_the_plan_says_what_auto_means_on_the_device_that_it_is_for(recipe):
    config = load(f"{recipe}.yaml")
    here, there = make_plan(config, None, "cpu"), make_plan(config, None, "cuda", H200)
    assert here["auto"] == {
        "train.precision": "float32", "runtime.device_tokens": 4096, "translate.batch_tokens": 4096,
    }  # fmt: skip
    tokens = gpu_defaults.translate_tokens(config.translate, config.model, 4, H200)
    share = gpu_defaults.device_tokens("auto", config.train.batch_tokens, 1, H200)
    assert there["auto"] == {
        "train.precision": "bfloat16", "runtime.device_tokens": share, "translate.batch_tokens": tokens,
    }  # fmt: skip
    assert there["memory"]["half_precision_copies"] > 0
    assert there["memory"]["micro_batch_tokens"] == max(share, 512)
    assert there["attention"]["decoder_cache"] == cache_bytes(config.model, 512, config.translate, tokens, 4)
    line = next(line for line in plan_lines(there) if line.startswith("auto"))
    assert (
        f"on cuda: train.precision bfloat16, runtime.device_tokens {share:,}, translate.batch_tokens {tokens:,}" in line
    )
    assert make_plan(config, None, "cuda") == make_plan(config, None, "cuda", Gpu(80 * GIB, bfloat16=True))


def test_the_plan_says_nothing_of_auto_where_numbers_were_given():
    given = ["train.precision=float32", "runtime.device_tokens=512", "translate.batch_tokens=512"]
    plan = make_plan(load(None, given), None, "cuda")
    assert plan["auto"] == {}
    assert not [line for line in plan_lines(plan) if line.startswith("auto")]


def test_what_was_given_stays_what_it_is():
    config = load(None, ["runtime.device_tokens=2048", "translate.batch_tokens=4096", "train.precision=float32"])
    for gpu in (None, OLD, H200):
        assert gpu_defaults.for_training(config, gpu) == config
