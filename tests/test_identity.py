"""Each setting does to the result what its kind says, and a run is resumed only as the training that it is."""

import dataclasses
import hashlib
import json
import shutil
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nmt import config
from nmt.config import BpeConfig, Config, EncodeConfig, load
from nmt.data.dataset import encode_corpus
from nmt.data.train_tokenizer import train_bpe
from nmt.decoding.translator import Translator
from nmt.distributed import gpu_defaults
from nmt.errors import ConfigError
from nmt.pipeline import stages
from nmt.pipeline.engine import Stage
from nmt.runs import checkpoint
from nmt.runs.identity import FORMAT, read_identity, training_settings
from nmt.training.loop import train_model
from tiny import ALONE, at, equal, final, losses, metrics, settings, state

BY_HAND = {
    "data.src": ["data.src=zh", "data.tgt=en"],
    "data.tgt": ["data.src=zh", "data.tgt=en"],
    "clean.columns": ["clean.columns=[zh, en]"],
    "clean.encoding": ["clean.encoding=gb18030"],
    "bpe.user_symbols": ["bpe.user_symbols=[]"],
    "model.heads": ["model.heads=4"],
    "model.kv_heads": ["model.kv_heads=4"],
    "model.d_model": ["model.d_model=256"],
    "optim.weight_decay": ["optim.optimizer=adamw", "optim.weight_decay=0.1"],
    "eval.metrics": ["eval.metrics=[bleu]"],
    "runtime.device_tokens": ["runtime.device_tokens=4096"],
    "translate.batch_tokens": ["translate.batch_tokens=4096"],
}
FILES = {"data.corpus", "clean.sources", "clean.dev", "clean.test", "bpe.model"}
"""They name files; it is the content of those that decides, which tests/test_pipeline.py holds."""


def all_settings() -> Iterator[tuple[str, str]]:
    for section, kind in config.SECTIONS.items():
        for name in config.kinds(kind):
            yield section, name


def another(section: str, name: str) -> list[str]:
    """Changes that give a setting another value than its default, and other settings only where they must."""
    path = f"{section}.{name}"
    if path in BY_HAND:
        return BY_HAND[path]
    value = getattr(getattr(Config(), section), name)
    hint = typing.get_type_hints(config.SECTIONS[section])[name]
    if isinstance(value, bool):
        candidates: list[Any] = [not value]
    elif typing.get_origin(hint) is typing.Literal:
        candidates = [word for word in typing.get_args(hint) if word != value]
    else:
        candidates = [value + 1, value * 2, value / 2, value + 0.5, (value + 1) / 2]
    for candidate in (each for each in candidates if each != value):
        try:
            load(None, [f"{path}={json.dumps(candidate)}"])
        except ConfigError:
            continue
        return [f"{path}={json.dumps(candidate)}"]
    raise AssertionError(f"no other value for {path}; put one into BY_HAND")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A raw corpus, of which nothing has been made."""
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "data/cmn/raw").mkdir(parents=True)
    (folder / "data/cmn/raw/few.tsv").write_text("Hello!\t你好！\n", encoding="utf-8")
    return folder


def walk(folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: str) -> list[Stage]:
    monkeypatch.chdir(folder)
    return stages.build_stages(load(None, changes), "run")


@pytest.mark.parametrize(("section", "name"), [path for path in all_settings() if ".".join(path) not in FILES])
def test_a_setting_is_in_the_fingerprint_of_a_stage_exactly_if_its_kind_is_result(
    section: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = another(section, name)
    assert getattr(getattr(load(None, changes), section), name) != getattr(getattr(Config(), section), name)
    one, two = walk(folder, monkeypatch), walk(folder, monkeypatch, *changes)
    changed = [a.name for a, b in zip(one, two, strict=True) if a.settings != b.settings]
    assert bool(changed) == (config.kinds(config.SECTIONS[section])[name] == "result")


def test_a_setting_that_says_nothing_of_its_kind_decides_the_result() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Section:
        plain: int = 1
        noted: typing.Annotated[int, config.RUNTIME] = 1

    assert config.kinds(Section) == {"plain": "result", "noted": "runtime"}
    assert config.of_kind(Section(), "result") == {"plain": 1}


def test_what_decides_a_training_and_what_does_not_stand_in_different_sections() -> None:
    found = {section: set(config.kinds(config.SECTIONS[section]).values()) for section in ("optim", "train", "runtime")}
    assert found == {"optim": {"result"}, "train": {"result"}, "runtime": {"numerics", "runtime"}}


def test_config_show_tells_the_kind_of_what_does_not_decide_the_result() -> None:
    lines = list(config.show(Config(), {"runtime.log_every": "--set"}))
    assert lines[lines.index("  log_every: 50") - 1].endswith(" (runtime)  [--set]")
    assert lines[lines.index("  compile: false") - 1].endswith(" (numerics)")
    assert "(result)" not in "".join(lines)


# ── that the kinds are true, by training ────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def plain(paths, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("plain") / "run"
    train_model(settings(), at(paths, run), ALONE)
    return run


@pytest.mark.parametrize(
    "change",
    [
        "runtime.log_every=1", "runtime.collective_timeout=5", "runtime.heartbeat_timeout=7",
        # What a trained model is asked for later must not decide which model that is.
        "translate.beam=7", "translate.alpha=3", "translate.max_length_offset=0", "translate.length_penalty=power",
        "translate.beam_patience=1", "translate.max_source_tokens=2",
        "eval.bootstrap=0",
    ],
)  # fmt: skip
def test_every_byte_of_the_model_and_of_the_dev_scores_stays(paths, plain, tmp_path, change) -> None:
    train_model(settings(change), at(paths, tmp_path / "run"), ALONE)
    files = ("model.safetensors", "state.json")
    one, two = ([(run / "final" / file).read_bytes() for file in files] for run in (plain, tmp_path / "run"))
    assert one == two
    scores = [
        [(row["step"], row["bleu"], row["loss"]) for row in metrics(run, "dev")] for run in (plain, tmp_path / "run")
    ]
    assert scores[0] == scores[1]


def test_numerics_change_rounding_alone(paths, tmp_path) -> None:
    for name, change in {"one": "runtime.device_tokens=40", "two": "runtime.device_tokens=1000"}.items():
        train_model(settings("model.dropout=0", "runtime.log_every=1", change), at(paths, tmp_path / name), ALONE)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one == pytest.approx(two, abs=1e-5)
    assert len(one) == 24


@pytest.mark.parametrize("change", ["train.keep_checkpoints=1", "train.save_every=4", "train.early_stop_metric=loss"])
def test_what_decides_the_final_model_is_in_the_identity(paths, plain, tmp_path, change) -> None:
    assert training_settings(settings(change)) != training_settings(settings())
    train_model(settings(change), at(paths, tmp_path / "run"), ALONE)
    if change != "train.early_stop_metric=loss":  # That one may choose the same.
        assert not equal(final(plain), final(tmp_path / "run"))


def test_the_longest_pair_is_in_the_identity_of_a_training_with_bpe_dropout_alone() -> None:
    one, two = (training_settings(settings(f"encode.max_tokens={n}", "bpe.dropout=0.1")) for n in (512, 8))
    assert one != two
    one, two = (training_settings(settings(f"encode.max_tokens={n}")) for n in (512, 8))
    assert one == two, "there the encoded data itself says it"


def test_the_longest_pair_decides_what_is_trained_with_bpe_dropout(paths, tmp_path) -> None:
    for longest in (512, 14):  # 14 tokens have room for each line as it is, but not for all of its cuts.
        config = settings(f"encode.max_tokens={longest}", "bpe.dropout=0.5", "train.max_steps=6")
        train_model(config, at(paths, tmp_path / str(longest)), ALONE)
    assert not equal(final(tmp_path / "512"), final(tmp_path / "14"))


# ── resuming ────────────────────────────────────────────────────────────────────────────────────────────────────────


def copy_of(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder / "copy")
    return folder / "copy"


def test_the_stage_and_the_run_folder_have_one_identity(plain, paths) -> None:
    found = read_identity(plain)
    assert found["settings"] == json.loads(json.dumps(training_settings(gpu_defaults.for_training(settings(), None))))
    meta = hashlib.sha256((paths.encode / "meta.json").read_bytes()).hexdigest()
    assert found["reads"]["encode/meta.json"] == meta
    assert set(found["reads"]) == {
        "encode/meta.json", "bpe/joint.model", "clean/normalisation.json", "clean/dev.en", "clean/dev.zh",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["normalisation.json", "dev.en", "dev.zh"])
def test_a_dev_set_or_normalisation_that_has_changed_is_another_training(paths, plain, tmp_path, name) -> None:
    run, clean = copy_of(plain, tmp_path), tmp_path / "clean"
    clean.mkdir()
    for file in paths.clean.iterdir():
        if file.is_file():
            shutil.copy(file, clean)
    (clean / name).write_bytes((clean / name).read_bytes().replace(b"keep", b"filter").replace(b"red", b"big")[:-1])
    with pytest.raises(ConfigError, match=f"clean/{name} has changed"):
        train_model(settings(), dataclasses.replace(at(paths, run), clean=clean), ALONE)


@pytest.mark.parametrize("steps", [23, 12, 1])
def test_fewer_steps_than_were_taken_are_refused_and_nothing_is_touched(paths, plain, tmp_path, steps) -> None:
    run = copy_of(plain, tmp_path)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=rf"it has taken 24 steps already, and train\.max_steps is {steps}"):
        train_model(settings(f"train.max_steps={steps}"), at(paths, run), ALONE)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"} == before


def test_more_steps_end_as_if_they_had_been_asked_for_at_once(paths, plain, tmp_path) -> None:
    run = at(paths, tmp_path / "run")
    for steps in (7, 18, 24):  # Of these only 24 is a multiple of validate_every, and none of save_every.
        train_model(settings(f"train.max_steps={steps}"), run, ALONE)
    files = [path.relative_to(plain) for name in ("final", "best", "checkpoints") for path in (plain / name).rglob("*")]
    for file in files:
        if file.suffix == ".safetensors":
            assert (run.run / file).read_bytes() == (plain / file).read_bytes(), file
    assert state(run.run) == state(plain)
    assert (run.run / "final/state.json").read_bytes() == (plain / "final/state.json").read_bytes()


def test_more_steps_of_a_cosine_are_another_training(paths, tmp_path) -> None:
    run = at(paths, tmp_path / "run")
    train_model(settings("optim.schedule=cosine", "train.max_steps=6"), run, ALONE)
    with pytest.raises(ConfigError, match=r"train\.max_steps: 6 -> 8"):
        train_model(settings("optim.schedule=cosine", "train.max_steps=8"), run, ALONE)


def test_a_run_of_an_older_format_is_refused_in_one_line(paths, plain, tmp_path) -> None:
    run = copy_of(plain, tmp_path)
    (run / "identity.json").write_text('{"model": {}, "content": {}}')
    with pytest.raises(
        checkpoint.CheckpointError, match=rf"format None, this nmt reads {FORMAT}; start over with nmt train --fresh"
    ):
        train_model(settings(), at(paths, run), ALONE)


def test_the_weights_that_a_training_began_with_are_part_of_what_it_is(paths, plain, tmp_path) -> None:
    run, other = at(paths, tmp_path / "run"), tmp_path / "other"
    train_model(settings("train.seed=5"), at(paths, other), ALONE)
    train_model(settings("train.max_steps=6"), run, ALONE, init_from=plain)
    with pytest.raises(ConfigError, match="did not begin with the weights"):
        train_model(settings("train.max_steps=6"), run, ALONE, init_from=other)
    with pytest.raises(ConfigError, match="did not begin with the weights"):
        train_model(settings(), at(paths, copy_of(plain, tmp_path)), ALONE, init_from=other)
    train_model(settings("train.max_steps=8"), run, ALONE)  # Whoever resumes need not name it again,
    train_model(settings("train.max_steps=9"), run, ALONE, init_from=plain)  # but may.
    assert read_identity(run.run)["init_from"]["run"] == str(plain)
    assert state(run.run)["step"] == 9


def test_a_run_to_begin_with_that_is_not_there_is_named(paths, tmp_path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match=r"--init-from: .*nowhere.* name the folder of a finished run"):
        train_model(settings(), at(paths, tmp_path / "run"), ALONE, init_from=tmp_path / "nowhere")


@pytest.mark.parametrize(
    "change", ["model.heads=4", "model.activation=gelu", "model.position=rope", "model.norm_eps=1e-3"]
)
def test_weights_of_another_model_are_refused_though_they_have_the_same_shapes(paths, plain, tmp_path, change) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match=rf"(?s)has another model:.*{change.partition('=')[0]}"):
        train_model(settings(change), at(paths, run), ALONE, init_from=plain)
    same = ["model.dropout=0", "model.decoder_layers=1", "model.kv_heads=2", "model.max_positions=2000"]
    train_model(settings("train.max_steps=1", *same), at(paths, run), ALONE, init_from=plain)


def test_a_run_does_not_begin_with_itself_and_keeps_all_that_it_has(paths, plain, tmp_path) -> None:
    run = copy_of(plain, tmp_path)
    before = sorted(run.rglob("*"))
    with pytest.raises(ConfigError, match=r"--init-from names .* itself"):
        train_model(settings(), at(paths, run), ALONE, init_from=run / ".." / run.name, fresh=True)
    assert sorted(run.rglob("*")) == before


def test_languages_that_change_sides_do_not_take_each_others_vocabularies(paths, tmp_path) -> None:
    apart = replace(paths, bpe=tmp_path / "bpe", encode=tmp_path / "encode")
    apart.encode.mkdir()
    # As many pieces on either side, so that the weights fit.
    train_bpe(
        paths.clean, BpeConfig(vocab_size=285, shared_vocab=False, character_coverage=1.0), ("en", "zh"), apart.bpe
    )
    encode_corpus(paths.clean, apart.bpe, EncodeConfig(), ("en", "zh"), apart.encode)
    changes = ["bpe.shared_vocab=false", "train.max_steps=1"]
    train_model(settings(*changes), at(apart, tmp_path / "one"), ALONE)
    turned = settings(*changes, "data.src=zh", "data.tgt=en")
    with pytest.raises(ConfigError, match="own vocabulary"):
        train_model(turned, at(apart, tmp_path / "two"), ALONE, init_from=tmp_path / "one")


def test_a_run_that_starts_over_with_two_vocabularies_forgets_the_joint_one(paths, plain, tmp_path) -> None:
    run = copy_of(plain, tmp_path)
    apart = replace(paths, bpe=tmp_path / "bpe", encode=tmp_path / "encode", run=run)
    apart.encode.mkdir()
    train_bpe(
        paths.clean, BpeConfig(vocab_size=285, shared_vocab=False, character_coverage=1.0), ("en", "zh"), apart.bpe
    )
    encode_corpus(paths.clean, apart.bpe, EncodeConfig(), ("en", "zh"), apart.encode)
    train_model(settings("bpe.shared_vocab=false", "train.max_steps=1"), apart, ALONE, fresh=True)
    assert sorted(path.name for path in (run / "tokenizer").iterdir()) == [
        "en.model",
        "en.vocab",
        "zh.model",
        "zh.vocab",
    ]
    shutil.copy(plain / "tokenizer/joint.model", run / "tokenizer")  # As an nmt before this one left it.
    with pytest.raises(checkpoint.CheckpointError, match=r"joint\.model is none of the vocabularies"):
        Translator.load(run, device="cpu")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("config.json", '"heads": 2', '"heads": 4'),
        ("config.json", '"activation": "relu"', '"activation": "gelu"'),
        ("config.json", '"src": "en"', '"src": "zh"'),
        ("normalisation.json", '"zh": true', '"zh": false'),
        ("normalisation.json", '"keep"', '"traditional"'),
    ],
)
def test_a_run_folder_with_a_file_of_another_training_does_not_translate(plain, tmp_path, name, old, new) -> None:
    run = copy_of(plain, tmp_path)
    Translator.load(run, device="cpu")
    text = (run / name).read_text()
    assert old in text
    text = text.replace(old, new).replace('"tgt": "zh"', '"tgt": "en"' if "src" in old else '"tgt": "zh"')
    (run / name).write_text(text)
    with pytest.raises(checkpoint.CheckpointError, match=rf"{name} is not what the run was trained with"):
        Translator.load(run, device="cpu")
