"""Every name that becomes a folder is held to one rule, so that no name leads out of data/ and runs/."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from little import nmt, nmt_process
from nmt.config import LONGEST_NAME, Config, check_name, load
from nmt.errors import ConfigError
from nmt.pipeline.stages import run_folder

BAD = {
    "empty": "", "dot": ".", "dots": "..", "three dots": "...", "up": "../x", "absolute": "/tmp/x", "inside": "a/b",
    "backslash": "a\\b", "up by backslash": "..\\x", "drive": "C:x", "hidden": ".x", "dot at the end": "x.",
    "space": " ", "space first": " x", "space last": "x ", "line end": "a\nb", "TAB": "a\tb", "NUL": "a\0b",
    "escape": "a\x1b[0m",
    "NEL": "a\x85b", "U+2028": "a\u2028b", "undecodable": "a\udcff", "star": "a*", "question": "a?", "pipe": "a|b",
    "quote": 'a"b', "angle": "a<b>", "device": "NUL", "device with an ending": "con.en-zh", "port": "Com1",
    "signs": "(+)", "long": "x" * (LONGEST_NAME + 1), "long in bytes": "模" * (LONGEST_NAME // 3 + 1),
    "megabyte": "/" * 10**6,
}  # fmt: skip
GOOD = [
    "x", "a.b", "base.bf16", "dropout=0.3", "lr1e-3,warm", "模型 甲", "配_方", "2024-01-01", "a+b (2)", "~x", "console",
    "null", "com", "x" * LONGEST_NAME, "Überschrift", "-x",
]  # fmt: skip


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with nothing but a folder in it that is not ours."""
    (tmp_path / "here" / "runs").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_text("not ours")
        (tmp_path / "here" / name).write_text("not ours")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_a_name_that_is_no_folder_name_is_refused_everywhere_before_anything_is_written(
    empty_folder: Path, name: str
) -> None:
    before = sorted(empty_folder.rglob("*"))
    for words in (
        ["train", "-c", "demo", "--name", name],
        ["train", "-c", "demo", "--name", name, "--fresh"],
        ["run", "-c", "demo", "--name", name],
        ["status", "-c", "demo", "--name", name],
        ["fetch", name, "--from", "config.json"],
    ):
        ended = nmt(*words)
        assert (ended.code, ended.out) == (2, b""), words
        assert "give a folder name" in ended.told
        assert len(ended.told) < 2000
    assert sorted(empty_folder.rglob("*")) == before
    for settings in ({"data": {"corpus": name}}, {"clean": {"sources": {name: "a.tsv"}}}):
        Path("bad.yaml").write_text(json.dumps(settings), encoding="utf-8", errors="surrogatepass")
        ended = nmt("config", "check", "-c", "bad.yaml")
        assert (ended.code, ended.out) == (2, b""), settings


@pytest.mark.parametrize("name", GOOD)
def test_any_other_name_is_a_folder_of_its_own(empty_folder: Path, name: str) -> None:
    check_name("--name", name)
    assert run_folder(Config(), name) == Path("runs") / name
    run_folder(Config(), name).mkdir()
    assert os.listdir("runs") == [name]


def test_a_recipe_whose_name_is_no_folder_name_needs_another_or_a_name_of_the_run(empty_folder: Path) -> None:
    for recipe in (".hidden.yaml", "a:b.yaml", f"{'x' * 199}.yaml", "nul.yaml"):
        Path(recipe).write_text("model: {layers: 1}\n")
        with pytest.raises(ConfigError, match=r"RECIPE\.SRC-TGT; --name gives another"):
            run_folder(load(recipe))
        assert run_folder(load(recipe), "fine") == Path("runs/fine")
        ended = nmt("status", "-c", recipe)
        assert (ended.code, "give a folder name" in ended.told) == (2, True)
    assert run_folder(Config(recipe="cmn-small")) == Path("runs/cmn-small.en-zh")
    with pytest.raises(ConfigError):
        run_folder(Config(recipe="../../x"))  # As the config.json of a foreign run may say.


def test_the_folder_of_all_runs_may_be_another_one(empty_folder: Path) -> None:
    there = "import nmt.runs.run_dir; print(nmt.runs.run_dir.RUNS)"
    for value, wanted in (("", "runs"), ("/tmp/some where", "/tmp/some where")):
        done = subprocess.run(
            [sys.executable, "-c", there],
            env=os.environ | {"NMT_RUNS": value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{wanted}\n"


def test_two_tab_separated_files_are_not_taken_for_two_languages(empty_folder: Path) -> None:
    for changes in (
        ["clean.test=[a.tsv, b.tsv]", "clean.dev=[d.tsv]"],
        ["clean.dev=[a.tsv, B.TSV]", "clean.test=[d.en, d.zh]"],
        ["clean.sources={x: [a.tsv, b.tsv]}"],
    ):
        ended = nmt("config", "check", *(word for change in changes for word in ("--set", change)))
        assert ended.code == 2, changes
        assert "two tab-separated files" in ended.told
        assert changes[0].split("=")[0] in ended.told
    load(None, ["clean.test=[a.txt, b.txt]", "clean.dev=[d.en, d.zh]"])
    load(None, ["clean.test=[a.tsv]", "clean.dev=[d.tsv]"])


def test_two_tables_are_told_when_they_are_read_where_their_names_say_nothing(empty_folder: Path) -> None:
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("Hello.\t你好。\nBye.\t再见。\n", encoding="utf-8")
    Path("data/cmn/raw").mkdir(parents=True)
    rows = "".join(f"Number {n}.\t第{n}号。\n" for n in range(60))
    Path("data/cmn/raw/x.tsv").write_text(rows, encoding="utf-8")
    words = ["-c", "cmn", "--set", "clean.test=[a.txt, b.txt]", "--set", "clean.dev=[a.txt, b.txt]"]
    ended = nmt_process("clean", *words, cwd=empty_folder / "here")
    assert ended.code == 1
    assert "name each tab-separated file alone" in ended.told
