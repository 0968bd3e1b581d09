"""Settings: what is refused and how, YAML's traps, and that any file at all gives settings or a ConfigError."""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nmt import config
from nmt.config import Config, differences, from_dict, load, load_with_origins, to_dict
from nmt.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture
def write(tmp_path: Path) -> typing.Callable[[str | bytes], str]:
    def to(text: str | bytes) -> str:
        path = tmp_path / "some.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return to


Write = typing.Callable[[str | bytes], str]

BAD = {
    "optim.warmup_steps=0": "give at least 1",
    "train.max_steps=-5": "give at least 1",
    "train.batch_tokens=0": "give at least 1",
    "train.batch_tokens=4k": "whole number",
    "train.batch_tokens=4096.5": "whole number",
    "train.batch_tokens=null": "whole number",
    "train.batch_tokens=true": "whole number",
    "train.label_smoothing=1": "below 1",
    "train.label_smoothing=-0.1": "from 0",
    "optim.clip_norm=-1": "0 or more",
    "optim.eps=0": "positive",
    "optim.learning_rate=.inf": "number",
    "optim.learning_rate=fast": "number",
    "optim.learning_rate=[1e-3, 1e-4]": "number",
    "optim.weight_decay=0.1": "set optim.optimizer to adamw",
    "optim.schedule=noan": "did you mean noam",
    "train.precision=fp16": "float32, bfloat16",
    "model.d_model=500": "496 would work",
    "model.d_model=0": "at least 1",
    "model.heads=0": "at least 1",
    "model.heads=7": "would work",
    "model.kv_heads=3": "must divide",
    "model.dropout=1.0": "below 1",
    "model.dropout=-0.1": "below 1",
    "model.dropout=10%": "number",
    "model.layers={a: 1}": "whole number",
    "model.norm_order=both": "post, pre",
    "model.norm_order=no": "post, pre",
    "bpe.vocab_size=100": "at least 270",
    "bpe.character_coverage=99.95": "from 0.9 to 1",
    "bpe.dropout=1": "below 1",
    "bpe.shared_vocab=yes": "true or false",
    "bpe.shared_vocab=1": "true or false",
    "encode.max_tokens=1": "at least 2",
    "translate.beam=0": "at least 1",
    "translate.beam=9000": "more than the vocabulary has",
    "translate.alpha=-1": "0 or more",
    "runtime.device_tokens=0": "at least 1",
    "train.keep_checkpoints=0": "at least 1",
    "runtime.compile=on": "true or false",
    "data.tgt=en": "two languages",
    "data.corpus=../etc": "folder name",
    "data.corpus=''": "folder name",
    "data.src=12": "text",
    "data.tgt=de": "clean.columns",
    "clean.zh_script=simple": "simplified",
    "clean.min_ratio=5": "min_ratio < max_ratio",
    "clean.columns=[en]": "two languages",
    "clean.dev=dev.tsv": "both as files",
    "clean.sources=cmn.txt": "names with values",
    "eval.metrics=[bleu, comet]": "comet",
    "eval.metrics=[chrf]": "lacks bleu",
}


@pytest.mark.parametrize(("change", "told"), BAD.items())
def test_a_bad_setting_is_refused_with_its_path_and_the_rule(change: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [change])
    assert told in str(caught.value)
    assert change.partition("=")[0] in str(caught.value) or "clean" in str(caught.value)
    assert caught.value.exit_code == 2


def test_all_faults_are_told_at_once(write: Write) -> None:
    path = write(
        "optim: {warmup_steps: 0, lable_smoothing: 0.2}\nmodle: {layers: 3}\nmodel: {layers: many, heads: 7}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(path, ["train.keep_checkpoints=0", "nonsense"])
    for told in (
        "warmup_steps",
        "label_smoothing",
        "modle",
        "model.layers",
        "model.d_model",
        "train.keep_checkpoints",
        "nonsense",
    ):
        assert any(told in problem for problem in caught.value.problems), told


def edits(name: str) -> set[str]:
    """Every name at edit distance 1."""
    cut = [(name[:i], name[i:]) for i in range(len(name) + 1)]
    return {a + b[1:] for a, b in cut if b} | {a + b[1] + b[0] + b[2:] for a, b in cut if len(b) > 1} | {
        a + "x" + b for a, b in cut
    }  # fmt: skip


@pytest.mark.parametrize("section", config.SECTIONS)
def test_a_typo_in_any_setting_is_answered_with_that_setting(section: str) -> None:
    names = {f.name for f in dataclasses.fields(config.SECTIONS[section])}
    for name in names:
        wrong = [typo for typo in edits(name) - names - {""} if typo.isidentifier()]
        with pytest.raises(ConfigError) as caught:
            load(None, [f"{section}.{typo}=1" for typo in wrong])
        told = str(caught.value)
        assert len(caught.value.problems) == len(wrong)
        # Of a name of three letters a typo may be nearer to another name.
        assert told.count(f"did you mean {section}.{name}?") >= (0.8 if len(name) > 4 else 0.4) * len(wrong), told


def test_a_setting_in_the_wrong_section_is_answered_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean optim\.warmup_steps\?"):
        load(None, ["train.warmup_steps=3"])
    with pytest.raises(ConfigError, match=r"Did you mean model\.layers\?"):
        load(None, ["layers=3"])


def test_numbers_are_read_as_people_write_them(write: Write) -> None:
    found = load(write("optim: {learning_rate: 1e-4, eps: 1.e-9, warmup_steps: 0100}\ntrain: {batch_tokens: 25_000}"))
    assert found.optim.learning_rate == 0.0001
    assert found.optim.eps == 1e-9
    assert found.train.batch_tokens == 25_000
    assert found.optim.warmup_steps == 100, "not octal"
    assert load(None, ["optim.clip_norm=1"]).optim.clip_norm == 1.0
    assert load(None, ["translate.alpha=1E0"]).translate.alpha == 1.0


def test_words_and_times_stay_text_where_yaml_would_change_them(write: Write) -> None:
    found = load(write("data: {src: no, corpus: 2024-01-01}\nclean: {columns: [no, zh], sources: {on: off}}"))
    assert (found.data.src, found.data.corpus) == ("no", "2024-01-01")
    assert found.clean.sources == {"on": ("off",)}
    with pytest.raises(ConfigError, match="'12:30'"):
        load(write("optim: {warmup_steps: 12:30}"))


def test_a_key_given_twice_is_refused_with_both_lines(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"layers is given twice, in lines 2 and 4"):
        load(write("model:\n  layers: 3\n  heads: 8\n  layers: 6\n"))
    with pytest.raises(ConfigError, match=r"model is given twice, in lines 1 and 3"):
        load(write("model:\n  layers: 3\nmodel:\n  heads: 8\n"))


def test_a_file_of_nested_aliases_is_refused_at_once(write: Write) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match=r"line 2: aliases"):
        load(write("\n".join(lines)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model:\n\tlayers: 3\n", "line 2"),
        ("model: {layers: 3", "line 1"),
        ("- model\n- optim\n", "expected sections"),
        ("3", "expected sections"),
        ("model: 3", "expected settings below it"),
        ("1: {layers: 3}", "is not a name"),
        ("!!python/object/apply:os.system ['true']", "some.yaml"),
        ("model: {layers: !!binary aGk=}", "line 1: tags"),
        ("---\nmodel: {}\n---\nmodel: {}\n", "some.yaml"),
        (b"model: {layers: \xff}", "not UTF-8"),
        ("x" * 1_000_001, "at most"),
        ("[" * 5000, "some.yaml"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused_with_its_place(write: Write, text: str | bytes, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(text))
    assert told in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_a_file_that_is_not_there_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean demo\.yaml\?"):
        load("demmo.yaml")


def test_a_recipe_is_found_by_its_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("demo").data.corpus == "mini"
    (tmp_path / "demo.yaml").write_text("data: {corpus: mine}")
    assert load("demo").data.corpus == "mine"


def test_an_empty_file_and_empty_sections_are_the_defaults(write: Write) -> None:
    assert dataclasses.replace(load(write("")), recipe="default") == Config()
    assert dataclasses.replace(load(write("# nothing\nmodel:\n")), recipe="default") == Config()


def test_set_wins_over_the_file_and_each_origin_is_known(write: Write) -> None:
    path = write("model: {layers: 3, heads: 4}")
    found, origins = load_with_origins(path, ["model.layers=2", "train.seed=7"])
    assert (found.model.layers, found.model.heads, found.train.seed, found.recipe) == (2, 4, 7, "some")
    assert origins == {"model.layers": "--set", "model.heads": path, "train.seed": "--set"}


def test_what_show_prints_is_a_file_with_the_same_settings(write: Write) -> None:
    found, origins = load_with_origins(
        None, ["model.layers=2", "clean.sources={a: [x.en, x.zh]}", "bpe.user_symbols=[]"]
    )
    text = "\n".join(config.show(found, origins))
    assert dataclasses.replace(load(write(text)), recipe="default") == found
    assert "[--set]\n  layers: 2" in text


def test_a_change_goes_on_top_of_settings_that_are_loaded() -> None:
    found = config.change(load(None, ["model.layers=2", "train.seed=7"]), ["model.layers=3", "translate.beam=1"])
    assert (found.model.layers, found.train.seed, found.translate.beam) == (3, 7, 1)
    with pytest.raises(ConfigError, match=r"did you mean translate\.beam\?"):
        config.change(found, ["translate.beem=2"])
    with pytest.raises(ConfigError, match=r"expected section\.key=value"):
        config.change(found, ["beam"])


def test_every_setting_has_a_sentence() -> None:
    for section, kind in config.SECTIONS.items():
        told = config.sentences(kind)
        for f in dataclasses.fields(kind):
            assert told[f.name].endswith((".", ")")), f"{section}.{f.name}"


def test_settings_survive_json() -> None:
    found = load(
        None, ["clean.sources={a: [x.en, x.zh], b: y.tsv}", "eval.metrics=[bleu, ter]", "model.norm_order=pre"]
    )
    assert from_dict(json.loads(json.dumps(to_dict(found)))) == found


def test_differences_name_each_setting_with_both_values() -> None:
    old, new = to_dict(load(None)), to_dict(load(None, ["model.layers=2", "clean.sources={a: b}"]))
    assert differences(old, new) == ["clean.sources: {} -> (absent)", "clean.sources.a: (absent) -> ['b']",
                                     "model.layers: 6 -> 2"]  # fmt: skip
    assert differences(old, old) == []


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["en", "zh", "pre", "rms", "simplified", "adamw", "bleu", "1e-4", "0", "1"])
)  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """Sections and settings that exist, with any values, and now and then a name that doesn't."""
    found: dict[str, Any] = {}
    for section in draw(st.lists(st.sampled_from(list(config.SECTIONS)), max_size=3, unique=True)):
        names = st.sampled_from([f.name for f in dataclasses.fields(config.SECTIONS[section])]) | st.text(max_size=6)
        found[section] = draw(st.dictionaries(names, VALUES, max_size=3))
    return found


def load_or_refuse(name: str | None, changes: tuple[str, ...] = ()) -> Config | None:
    """The settings, or None where they were refused as they should be; anything else that is raised goes up."""
    try:
        return load(name, changes)
    except ConfigError as refusal:
        problems = refusal.problems
    assert problems
    assert all(problem.strip() for problem in problems)
    return None


@given(content=files())
def test_any_values_give_settings_or_a_refusal(
    content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "values.yaml"
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    found = load_or_refuse(str(path))
    if found is not None:
        assert from_dict(json.loads(json.dumps(to_dict(found)))) == found


@given(
    content=st.binary(max_size=200) | st.text(alphabet="ab:,{}[]&*!|>-#'\"\n\t 01.e_?%", max_size=60).map(str.encode)
)
def test_any_bytes_give_settings_or_a_refusal(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(content)
    load_or_refuse(str(path))


@given(change=st.text(max_size=30) | st.text(max_size=10).map(lambda value: f"model.layers={value}"))
def test_any_change_gives_settings_or_a_refusal(change: str) -> None:
    load_or_refuse(None, (change,))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_loads_and_is_short(path: Path) -> None:
    assert load(str(path)).recipe == path.stem
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
