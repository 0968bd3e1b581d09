"""Any bytes, structure or words as settings: they are taken or refused, and nothing ends in a traceback."""

import contextlib
import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from little import Ended, nmt
from nmt import config
from nmt.config import Config, load
from nmt.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"
KINDS: dict[str, dict[str, Any]] = {
    section: {f.name: typing.get_type_hints(kind)[f.name] for f in dataclasses.fields(kind)}
    for section, kind in config.SECTIONS.items()
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run: without data."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


VALUES = st.sampled_from([
    *("1e-4", "3e-4", "1_000", "0100", "2", "8", "0.5", "-1", ".5", "1.", "+1", "1e3", "-0", "0x10", "12:30"),
    *("no", "on", "true", "True", "null", "~", "", "'1'", '"2"', "[a, b]", "[]", "{a: b}", "{a: [b, c]}", "pre", "rms"),
    *("en", "zh", "2024-01-01", "!x y", "*a", "# nothing", "[", "{", "'", "你好", "\u3000"),
]) | st.text(alphabet="abc019.-_eE'\"[]{},~ ", max_size=8)  # fmt: skip
NAMES = st.sampled_from([f"{section}.{key}" for section, kinds in KINDS.items() for key in kinds])


@settings(max_examples=300)
@given(name=NAMES, value=VALUES)
def test_a_value_means_the_same_in_a_file_and_on_the_command_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: str
) -> None:
    section, key = name.split(".")
    path = tmp_path_factory.getbasetemp() / "same.yaml"
    path.write_text(f"{section}:\n  {key}: {value}\n", encoding="utf-8")

    def outcome(file: str | None, changes: list[str]) -> Config | str:
        try:
            return dataclasses.replace(load(file, changes), recipe="x")
        except ConfigError as error:
            # What is wrong, without where: the two places differ.
            return "refused" if "line " in str(error) or "--set" in str(error) else str(error)

    in_file, typed = outcome(str(path), []), outcome(None, [f"{name}={value}"])
    assert (in_file == typed) or (isinstance(in_file, str) and isinstance(typed, str))


LEVELS = pytest.mark.parametrize("examples", [25, pytest.param(1000, marks=pytest.mark.slow)])
COMMANDS = st.sampled_from([["config", "check"], ["config", "show"], ["config", "show", "--json"], ["plan"], ["status"],
                            ["run"], ["clean"], ["train"]])  # fmt: skip


def sound(ended: Ended) -> None:
    """The end of a command that met settings of any kind, where there are no data."""
    assert ended.code in (0, 1, 2)
    assert ended.code == 0 or ended.told.strip()
    assert ended.code == 0 or ended.out == b""


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(
    ["en", "zh", "pre", "rope", "learned", "adamw", "cosine", "bleu", "1e-4", 1, 2, 8, 512, 2**31 - 1, 1e308, 5e-324]
)  # fmt: skip
TREES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
KNOWN_TREES = st.fixed_dictionaries(
    {}, optional={s: st.fixed_dictionaries({}, optional=dict.fromkeys(keys, TREES)) for s, keys in KINDS.items()}
)
PIECES = [b"\t", b"&a ", b"*a", b"!!int ", b"- ", b": ", b"\n", b"\n  ", b"{", b"'", b"9" * 12, b"-", b"\xff", b"no"]
RECIPES = [path.read_bytes() for path in sorted(CONFIGS.glob("*.yaml"))]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A recipe in which a few stretches were cut, doubled, moved or changed."""
    text = draw(st.sampled_from(RECIPES))
    for _ in range(draw(st.integers(1, 4))):
        a, b, c = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 3)))
        b = min(b, a + 40)
        cut, doubled, moved = text[:a] + text[b:], text[:b] + text[a:], text[:a] + text[b:c] + text[a:b] + text[c:]
        added = text[:a] + draw(st.sampled_from(PIECES)) + text[a:]
        text = draw(st.sampled_from([cut, doubled, moved, added]))
    return text


@LEVELS
def test_any_file_gives_settings_or_a_refusal(empty_folder: Path, examples: int) -> None:
    @settings(max_examples=examples)
    @given(
        content=st.binary(max_size=200)
        | TREES.map(lambda tree: yaml.safe_dump(tree, allow_unicode=True).encode())
        | KNOWN_TREES.map(lambda tree: yaml.safe_dump(tree).encode())
        | mutated(),
        command=COMMANDS,
    )
    def holds(content: bytes, command: list[str]) -> None:
        Path("any.yaml").write_bytes(content)
        sound(nmt(*command, "-c", "any.yaml"))

    holds()


@LEVELS
def test_any_words_give_settings_or_a_refusal(empty_folder: Path, examples: int) -> None:
    words = (
        st.tuples(NAMES, VALUES).map("=".join)
        | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
        | st.tuples(NAMES, SCALARS).map(lambda pair: f"{pair[0]}={pair[1]}")
    )

    @settings(max_examples=examples)
    @given(changes=st.lists(words, max_size=4), command=COMMANDS, file=st.none() | st.sampled_from(["demo", "base"]))
    def holds(changes: list[str], command: list[str], file: str | None) -> None:
        given_file = ["-c", file] if file else []
        sound(nmt(*command, *given_file, *(word for change in changes for word in (f"--set={change}",))))

    holds()


@LEVELS
def test_settings_that_are_accepted_can_be_planned_whatever_they_are(empty_folder: Path, examples: int) -> None:
    numbers = {
        int: st.sampled_from([0, 1, 2, 3, 8, 64, 512, 2**20, 2**31 - 1]),
        float: st.sampled_from([0.0, 5e-324, 1e-9, 0.1, 0.5, 0.99, 1.0, 2.0, 10.0, 1e30, 1.7e308]),
        bool: st.booleans(),
    }
    wanted = {
        f"{section}.{key}": st.sampled_from(typing.get_args(kind)) if typing.get_origin(kind) else numbers[kind]
        for section in ("encode", "model", "optim", "train", "runtime", "translate", "eval")
        for key, kind in KINDS[section].items()
        if kind in numbers or typing.get_origin(kind) is typing.Literal
    }

    @settings(max_examples=examples)
    @given(changes=st.dictionaries(st.sampled_from(sorted(wanted)), st.none(), max_size=6), data=st.data())
    def holds(changes: dict[str, None], data: st.DataObject) -> None:
        words = [f"--set={name}={str(data.draw(wanted[name])).lower()}" for name in changes]
        ended = nmt("plan", "-c", "base", *words)
        assert ended.code in (0, 2), ended.told
        assert (ended.code == 0) == (nmt("config", "check", *words).code == 0)

    with contextlib.chdir(empty_folder):
        holds()
