"""Settings that can't be: each is refused with exit code 2, the rule and what would work, before any data is read."""

import dataclasses
import functools
import itertools
import json
import random
import time
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from little import nmt
from nmt import config
from nmt.config import load, to_dict
from nmt.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run: without data, so that whatever looks for data fails with another code."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sets(changes: str) -> list[str]:
    return [word for change in changes.split(" & ") for word in ("--set", change)]


# ── impossible values ───────────────────────────────────────────────────────────────────────────────────────────────

IMPOSSIBLE = [
    # what is wrong, what is said of it, and a value out of the answer that works
    ("data.tgt=en", "give two languages", "data.tgt=zh"),
    ("data.tgt=cn", "data.tgt: 'cn' is not a language code; did you mean zh?", "data.tgt=zh"),
    ("data.src=English", "data.src: 'English' is not a language code; did you mean en?", "data.src=en"),
    ("clean.columns=[en, chs]", "clean.columns: 'chs' is not a language code; did you mean zh-Hans?", "data.tgt=zh"),
    ("data.src=../x", "give a language code, e.g. en", "data.src=en"),
    ("data.corpus=a/b", "letters, digits, '.', '_' or '-'", "data.corpus=a_b"),
    ("clean.columns=[en, en]", "e.g. [en, zh]", "clean.columns=[en, zh]"),
    ("clean.columns=[en, attribution]", "e.g. en, zh", "clean.columns=[en, zh]"),
    ("clean.encoding=utf-16", "e.g. utf-8", "clean.encoding=utf-8"),
    ("clean.encoding=idna", "gb18030 or big5", "clean.encoding=big5"),
    ("clean.dev_size=0", "at least 1", "clean.dev_size=1"),
    ("clean.seed=-1", "0 or more", "clean.seed=0"),
    ("clean.max_words=0", "at least 1", "clean.max_words=1"),
    ("clean.max_byte_ratio=0.5", "at least 1", "clean.max_byte_ratio=1"),
    ("clean.min_ratio=2 & clean.max_ratio=2", "0 <= min_ratio < max_ratio", "clean.min_ratio=0 & clean.max_ratio=2"),
    ("clean.min_han_share=1.5", "from 0 to 1", "clean.min_han_share=1"),
    ("clean.zh_script=hant", "simplified, traditional, keep, filter", "clean.zh_script=traditional"),
    ("bpe.vocab_size=259", "at least 270", "bpe.vocab_size=270"),
    ("bpe.vocab_size=270 & bpe.user_symbols=[<a>, <b>, <c>]", "at least 272",
     "bpe.vocab_size=272 & bpe.user_symbols=[<a>, <b>, <c>]"),
    ("bpe.vocab_size=3000000000", "at most 2,147,483,647", "bpe.vocab_size=2147483647"),
    ("bpe.character_coverage=0.5", "from 0.9 to 1", "bpe.character_coverage=0.9"),
    ("bpe.dropout=1", "below 1", "bpe.dropout=0.9"),
    ("bpe.user_symbols=[a b]", "without spaces", "bpe.user_symbols=[ab]"),
    ("bpe.user_symbols=[<s>]", "none of them special", "bpe.user_symbols=[<t>]"),
    ("bpe.shared_vocab=false & bpe.model=[a.model]", "give two or none",
     "bpe.shared_vocab=false & bpe.model=[a.model, b.model]"),
    ("encode.max_tokens=1", "at least 2", "encode.max_tokens=2"),
    ("model.d_model=500", "496 would work", "model.d_model=496"),
    ("model.heads=7", "518 would work", "model.heads=7 & model.d_model=518"),
    ("model.d_model=9 & model.heads=3", "give an even number", "model.d_model=12 & model.heads=3"),
    ("model.heads=0", "at least 1", "model.heads=1"),
    ("model.kv_heads=3", "1 would work", "model.kv_heads=1"),
    ("model.kv_heads=16", "8 would work", "model.kv_heads=8"),
    ("model.dropout=1", "below 1", "model.dropout=0.9"),
    ("model.dropout=-0.1", "model.dropout", "model.dropout=0"),
    ("model.norm_eps=0", "e.g. 1e-5", "model.norm_eps=1e-5"),
    ("model.position=rope & model.heads=4 & model.d_model=20", "model.d_model that 8 (2 x model.heads) divides",
     "model.position=rope & model.heads=4 & model.d_model=8"),
    ("model.position=learned & model.max_positions=100", "model.max_positions (100)",
     "model.position=learned & model.max_positions=100 & encode.max_tokens=100"),
    ("optim.warmup_steps=0", "at least 1", "optim.warmup_steps=1"),
    ("train.batch_tokens=0", "at least 1", "train.batch_tokens=1"),
    ("train.label_smoothing=1", "from 0 to below 1", "train.label_smoothing=0"),
    ("optim.beta2=1", "from 0 to below 1", "optim.beta2=0"),
    ("optim.learning_rate=0", "positive", "optim.learning_rate=1e-9"),
    ("optim.learning_rate=.nan", "number", "optim.learning_rate=1e-9"),
    ("optim.weight_decay=0.1", "set optim.optimizer to adamw", "optim.weight_decay=0.1 & optim.optimizer=adamw"),
    ("train.seed=-1", "0 or more", "train.seed=0"),
    ("train.seed=99999999999", "at most 2,147,483,647", "train.seed=2147483647"),
    ("runtime.device_tokens=0", "at least 1", "runtime.device_tokens=1"),
    ("train.keep_checkpoints=0", "at least 1", "train.keep_checkpoints=1"),
    ("train.save_every=0", "at least 1", "train.save_every=1"),
    ("translate.beam=0", "at least 1", "translate.beam=1"),
    ("translate.beam=8001", "at most 8000", "translate.beam=8000"),
    ("translate.alpha=-1", "0 or more", "translate.alpha=0"),
    ("translate.alpha=1e300", "at most 10", "translate.alpha=10"),
    ("translate.max_length_offset=1000000", "at most 10,000", "translate.max_length_offset=10_000"),
    ("translate.max_source_tokens=1", "at least 2", "translate.max_source_tokens=2"),
    ("eval.metrics=[comet]", "bleu, chrf, ter", "eval.metrics=[bleu, chrf, ter]"),
    ("eval.metrics=[bleu, ter] & data.tgt=th & clean.columns=[en, th]", "ter, which takes a line of th for one word",
     "eval.metrics=[bleu, ter] & data.tgt=ko & clean.columns=[en, ko]"),
    ("eval.seed=-1", "0 or more", "eval.seed=0"),
    ("eval.bootstrap=-5", "0 or more", "eval.bootstrap=0"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "said", "right"), IMPOSSIBLE, ids=[row[0] for row in IMPOSSIBLE])
def test_an_impossible_value_is_refused_with_the_rule_and_what_works(wrong: str, said: str, right: str) -> None:
    for command in ("run", "clean", "train"):
        ended = nmt(command, "-c", "base", *sets(wrong))
        assert (ended.code, ended.out) == (2, b"")
        assert said in ended.told
        assert wrong.split(" & ")[0].split("=")[0].split(".")[0] in ended.told
    load(None, right.split(" & "))


# ── wrong types ─────────────────────────────────────────────────────────────────────────────────────────────────────

KINDS: dict[str, dict[str, Any]] = {
    section: {f.name: typing.get_type_hints(kind)[f.name] for f in dataclasses.fields(kind)}
    for section, kind in config.SECTIONS.items()
}
WRONG: dict[Any, list[Any]] = {
    int: [None, "many", 1.5, True, [1], {"a": 1}, "12:30"],
    float: [None, "some", False, [0.1], {"a": 0.1}],
    bool: [None, "on", 0, 1.0, [True], {"a": True}],
    str: [None, 12, 0.5, True, ["en"], {"a": "en"}],
    tuple: [None, 3, [None], [[]], {"a": "b"}, [1]],
    dict: [None, 3, "text", ["a"], {"a": None}, {"a": {"b": "c"}}],
    typing.Literal: [None, 7, True, [], {}, "none of them"],
    typing.Union: [None, "many", 1.5, True, [1]],  # int | Literal["auto"]
}


@pytest.mark.parametrize("turn", range(7))
def test_every_setting_of_a_wrong_type_is_told_at_once_with_its_value_and_the_type(
    empty_folder: Path, turn: int
) -> None:
    wrong = {
        section: {key: WRONG[typing.get_origin(kind) or kind][turn % 5] for key, kind in kinds.items()}
        for section, kinds in KINDS.items()
    }
    (empty_folder / "wrong.yaml").write_text(json.dumps(wrong), encoding="utf-8")  # JSON is YAML.
    ended = nmt("config", "check", "-c", "wrong.yaml")
    assert ended.code == 2
    told = ended.told.removesuffix("\n").split("\n")
    assert len(told) == sum(map(len, KINDS.values()))
    for section, values in wrong.items():
        for key, value in values.items():
            (line,) = (line for line in told if line.startswith(f"{section}.{key} "))
            assert line.startswith(f"{section}.{key} (wrong.yaml) is {value!r}; expected ")


# ── slips of the pen ────────────────────────────────────────────────────────────────────────────────────────────────


def distance(one: str, other: str) -> int:
    """Letters added, left out, changed or swapped, by the definition."""

    @functools.cache
    def least(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        found = min(least(i - 1, j) + 1, least(i, j - 1) + 1, least(i - 1, j - 1) + (one[i - 1] != other[j - 1]))
        if i > 1 and j > 1 and one[i - 2 : i] == other[j - 2 : j][::-1]:
            found = min(found, least(i - 2, j - 2) + 1)
        return found

    return least(len(one), len(other))


def slip(name: str, draw: random.Random) -> str:
    at = draw.randrange(len(name))
    letter = draw.choice("abcdefghijklmnopqrstuvwxyz_")
    return draw.choice([
        name[:at] + name[at + 1 :], name[:at] + letter + name[at:], name[:at] + letter + name[at + 1 :],
        name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
    ])  # fmt: skip


@pytest.mark.parametrize("section", KINDS)
def test_a_name_within_two_slips_is_answered_with_the_nearest_setting(section: str) -> None:
    draw = random.Random(section)
    every = {name for names in KINDS.values() for name in names}
    for name in KINDS[section]:
        typed = {slip(name, draw) for _ in range(4)} | {slip(slip(name, draw), draw) for _ in range(4)}
        typed = {word for word in typed - every if word.isidentifier() and distance(word, name) <= 2}
        with pytest.raises(ConfigError) as caught:
            load(None, [f"{section}.{word}=1" for word in sorted(typed)])
        for word, problem in zip(sorted(typed), caught.value.problems, strict=True):
            edits = {other: distance(word, other) for other in every}
            if min(edits.values()) >= len(word):
                continue  # Nothing of the name is left.
            meant_section, meant = problem.partition("did you mean ")[2].rstrip("?").split(".")
            assert edits[meant] == min(edits.values()), problem
            nearest_here = [other for other in KINDS[section] if edits[other] == edits[meant]]
            assert not nearest_here or meant_section == section, problem


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("train.lerning_rate=1", "optim.learning_rate"),
        ("optim.learningrate=1", "optim.learning_rate"),
        ("modle.dropout=0", "model.dropout"),
        ("dropuot=0", ".dropout"),
        ("optim.d_model=8", "model.d_model"),
        ("runtime.max_steps=8", "train.max_steps"),
        ("optim.lr=1e-3", "optim.learning_rate"),
        ("train.lr=1e-3", "optim.learning_rate"),
        ("optim.LR=1e-3", "optim.learning_rate"),
        ("optim.wd=0.1", "optim.weight_decay"),
        ("optim.ls=0.1", "train.label_smoothing"),
        ("optim.warmup=100", "optim.warmup_steps"),
        ("optim.batch_size=64", "train.batch_tokens"),
        ("optim.steps=10", "train.max_steps"),
        ("model.n_layers=3", "model.layers"),
        ("model.num_heads=4", "model.heads"),
        ("model.hidden_size=256", "model.d_model"),
        ("model.encoder_layers=3", "model.layers"),
        ("translate.beam_size=5", "translate.beam"),
        ("translate.lenpen=1", "translate.alpha"),
        ("train.fp16=true", "train.precision"),
        ("data.target_lang=zh", "data.tgt"),
        ("bpe.size=8000", "bpe.vocab_size"),
    ],
)
def test_a_slip_is_answered_in_a_second_also_where_the_section_is_wrong(word: str, meant: str) -> None:
    begun = time.process_time()
    ended = nmt("run", "-c", "base", "--set", word)
    assert time.process_time() - begun < 1
    assert ended.code == 2
    assert f"ean {meant}?" in ended.told or (meant[0] == "." and f"{meant}?" in ended.told)


def test_a_section_is_answered_with_the_nearest(empty_folder: Path) -> None:
    (empty_folder / "a.yaml").write_text("modle: {layers: 2}\ntranlsate: {beam: 2}\nlayers: 3\nzzzzzzzz: {}\n")
    told = nmt("config", "check", "-c", "a.yaml").told
    for meant in ("did you mean model?", "did you mean translate?", "did you mean model.layers?", "known are data, "):
        assert meant in told


# ── YAML's traps and bombs ──────────────────────────────────────────────────────────────────────────────────────────

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in itertools.pairwise("abcdefghi")
)
FILES: dict[str, tuple[str | bytes, str]] = {
    "key twice": ("model:\n  layers: 2\n  heads: 8\n  layers: 3\n", "layers is given twice, in lines 2 and 4"),
    "section twice": ("model: {layers: 2}\noptim: {}\nmodel: {heads: 8}\n", "model is given twice, in lines 1 and 3"),
    "tab": ("model:\n\tlayers: 2\n", "line 2, column 1"),
    "no for a boolean": ("runtime: {compile: no}", "'no'; expected true or false"),
    "on for a boolean": ("runtime: {compile: on}", "'on'; expected true or false"),
    "off for a word": ("model: {norm_order: off}", "'off'; expected one of post, pre"),
    "time for a number": ("train: {max_steps: 12:30}", "'12:30'; expected a whole number"),
    "octal": ("train: {max_steps: 0o17}", "'0o17'; expected a whole number"),
    "hexadecimal": ("train: {max_steps: 0x10}", "'0x10'; expected a whole number"),
    "date for a number": ("train: {max_steps: 2024-01-01}", "expected a whole number"),
    "number for text": ("data: {src: 12}", "12; expected a text"),
    "null for text": ("data: {src: ~}", "None; expected a text"),
    "aliases that make gigabytes": (BOMB, "aliases (*name) are not allowed"),
    "an alias at all": ("model: &m {layers: 2}\noptim: *m\n", "line 2: aliases"),
    "merge": ("model: {<<: {layers: 2}}", "line 1"),
    "merge of no mapping": ("model: {<<: 3}", "line 1"),
    "python object": ("model: !!python/object/apply:os.system ['true']", "line 1: tags"),
    "tag that doesn't fit": ("model: {layers: !!float ''}", "line 1: tags"),
    "tag of a boolean": ("runtime: {compile: !!bool x}", "line 1: tags"),
    "tag of a time": ("data: {src: !!timestamp x}", "line 1: tags"),
    "set": ("model: !!set {layers}", "line 1: tags"),
    "own tag": ("model: {norm_order: !mine pre}", "line 1: tags"),
    "NUL in a name": ('bpe: {model: ["a\\0b"]}', "control characters"),
    "half a character": ('data: {corpus: "\\ud800"}', "control characters"),
    "line end in a name": ('clean: {sources: {"a\\nb": x}}', "control characters"),
    "number without end": ("train: {max_steps: " + "9" * 5_000 + "}", "not a settings file"),
    "large number": ("train: {max_steps: " + "9" * 500 + "}", "at most 2,147,483,647"),
    "key that is a list": ("model: {[a, b]: 3}", "line 1"),
    "key that is a number": ("model: {1: 3}", "1 is not a name"),
    "two documents": ("model: {}\n---\nmodel: {}\n", "line 2"),
    "deep": ("model: {layers: " + "[" * 100_000, "not a settings file"),
    "too large": ("#" * 1_000_001, "1,000,001 bytes; a settings file has at most 1,000,000"),
    "UTF-16": ("model: {layers: 2}".encode("utf-16"), "not UTF-8"),
    "NUL": (b"model: {layers: 2}\x00", "a.yaml"),
    "a list": ("- model", "holds list at its top"),
    "a word": ("model", "holds str at its top"),
    "section that is none": ("model: 3", "expected settings below it"),
    "a value of a megabyte": ("data: {corpus: '" + "/" * 900_000 + "'}", "give a folder name"),
    "a name of a megabyte": ("data: {? " + "x" * 900_000 + " : 3}", "unknown setting data.xxx"),
    "seventy thousand names": ("model:\n" + "".join(f"  k{n}: 1\n" for n in range(70_000)), "and 69,900 more."),
    "forty thousand sections": ("".join(f"modl{n}: {{}}\n" for n in range(40_000)), "and 39,900 more."),
}


@pytest.mark.parametrize(("text", "said"), FILES.values(), ids=FILES)
def test_a_trap_or_bomb_in_a_file_is_refused_with_its_place(empty_folder: Path, text: str | bytes, said: str) -> None:
    (empty_folder / "a.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    begun = time.process_time()
    ended = nmt("run", "-c", "a.yaml")
    assert (ended.code, ended.out) == (2, b"")
    assert said in ended.told
    assert "a.yaml" in ended.told or "data.corpus is '//" in ended.told
    assert len(ended.told) < 100_000
    assert time.process_time() - begun < 30


@pytest.mark.parametrize("name", ["none", "", ".", "/", "folder", "demo.yaml/x", "x" * 5_000, "配 方", "-"])
def test_a_file_that_is_none_is_refused(empty_folder: Path, name: str) -> None:
    (empty_folder / "folder").mkdir()
    ended = nmt("config", "check", "-c", name)
    assert ended.code == 2
    assert ended.told.strip()


@pytest.mark.parametrize("value", ["bfloat61", "float23", "bf16"])
def test_a_value_with_a_near_one_is_answered_with_one_question_mark(value: str) -> None:
    told = nmt("config", "check", "--set", f"train.precision={value}").told.strip()
    assert told.endswith("did you mean bfloat16?" if value != "float23" else "?")


# ── which recipe ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("command", ["clean", "bpe", "encode", "train", "run", "status", "plan"])
def test_a_command_of_a_recipe_wants_to_be_told_which_and_lists_them(empty_folder: Path, command: str) -> None:
    (empty_folder / "configs").mkdir()
    (empty_folder / "configs/mine.yaml").write_text("")
    ended = nmt(command, "--set", "model.layers=2")
    assert (ended.code, ended.out) == (2, b"")
    for recipe in ("-c FILE", "base.yaml", "cmn-small.yaml", "demo.yaml", "mine.yaml"):
        assert recipe in ended.told
    assert [path.name for path in empty_folder.iterdir()] == ["configs"]


def test_the_defaults_can_be_shown_and_checked_without_a_recipe() -> None:
    assert nmt("config", "show").code == 0
    assert nmt("config", "check").code == 0


# ── overrides, and where a value came from ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("recipe", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_show_prints_the_merged_settings_and_where_each_value_came_from(empty_folder: Path, recipe: str) -> None:
    change = ["--set", "optim.learning_rate=3e-4", "--set", "model.layers=2"]
    ended = nmt("config", "show", "-c", recipe, *change)
    assert ended.code == 0
    in_file = {
        f"{section}.{key}"
        for section, values in yaml.safe_load((CONFIGS / recipe).read_text(encoding="utf-8")).items()
        for key in values
    }
    section, found = "", {}
    for above, line in zip(ended.lines, ended.lines[1:], strict=False):
        if not above.startswith(" ") and above:
            section = above.split(":")[0]
        if line.startswith("  ") and line[2] != "#":
            origin = above.rpartition("  [")[2].rstrip("]") if "  [" in above else ""
            found[f"{section}.{line.strip().split(':')[0]}"] = origin
    assert len(found) == sum(map(len, KINDS.values()))
    for name, origin in found.items():
        if name in ("optim.learning_rate", "model.layers"):
            assert origin == "--set", name
        else:
            assert origin.endswith(recipe) if name in in_file else origin == "", name
    (empty_folder / "shown.yaml").write_bytes(ended.out)
    words = [word for word in change if word != "--set"]
    assert to_dict(load("shown.yaml")) | {"recipe": ""} == to_dict(load(recipe, words)) | {"recipe": ""}


def test_all_words_that_are_wrong_are_told_together() -> None:
    ended = nmt(
        "run",
        "-c",
        "base",
        *sets("model.layers=[ & train.keep_checkpoints=0 & model.heads=7 & nonsense & optim.sede=1"),
    )
    assert ended.code == 2
    for told in ("--set model.layers", "train.keep_checkpoints", "model.heads", "nonsense", "train.seed"):
        assert told in ended.told
