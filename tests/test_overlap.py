"""A test set that a run was trained on is not scored unnoticed, whether the run itself saw it or the one before it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.corpus import Normaliser, held_out_keys
from nmt.errors import ConfigError, DataError
from nmt.io import read_lines, write_lines
from nmt.runs import overlap
from nmt.runs.run_dir import RunDir
from nmt.training.loop import train_model
from test_end_to_end import fresh_clone, nmt
from tiny import ALONE, at, settings

NORMALISER = Normaliser("simplified", {"en": False, "zh": True})


def write_keys(folder: Path, pairs: list[tuple[str, str]]) -> Path:
    """A folder like that of `clean`, as far as it says what was trained on."""
    folder.mkdir(exist_ok=True)
    for lang, keys in zip(("en", "zh"), held_out_keys(pairs, NORMALISER), strict=True):
        (folder / f"train.{lang}.keys").write_bytes(keys.astype("<u8").tobytes())
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was trained on two pairs."""
    clean = write_keys(tmp_path / "clean", [("Hello there.", "你好。"), ("It costs $10.50!", "这个十块半。")])
    NORMALISER.save(clean / "normalisation.json")
    (tmp_path / "run").mkdir()
    shutil.copy(clean / "normalisation.json", tmp_path / "run")
    overlap.keep_keys(clean, ["en", "zh"], tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("src", "refs", "known"),
    [
        ("Hello there.", ["再见。"], True),
        ("hello   THERE", ["再见。"], True),  # But for case, width, marks and spaces,
        ("Ｈｅｌｌｏ there！", ["再见。"], True),
        ("Goodbye.", ["你好！"], True),  # on either side,
        ("Goodbye.", ["再见。", "這個十塊半"], True),  # in any reference, in either script.
        ("It costs $1050.", ["再见。"], True),
        ("Hello there, you.", ["你好吗？"], False),
        ("你好。", ["Hello there."], False),  # The other way round it is another direction.
        ("Goodbye.", ["再见。", "回头见。"], False),
    ],
)
def test_a_line_is_known_by_its_source_or_any_of_its_references(
    run: Path, src: str, refs: list[str], known: bool
) -> None:
    lines = (["Nothing.", src, "Nothing."], [["无。"], refs, ["无。"]])
    assert overlap.seen(run, "en", *lines).tolist() == [False, known, False]
    # A run that translates into English has the same columns.
    turned = overlap.seen(run, "zh", refs[:1], [[src]])
    assert turned.tolist() == [bool(overlap.seen(run, "en", [src], [refs[:1]])[0])]


def test_some_known_lines_are_refused_with_the_first_and_counted_where_they_are_allowed(run: Path) -> None:
    srcs, refs = ["One.", "Hello there.", "hello there"], [["一。"], ["二。"], ["三。"]]
    with pytest.raises(DataError, match=r"2 of 3 test lines .* \(the first is line 2: Hello there\.\)"):
        overlap.check_unseen(run, "en", srcs, refs, allow=False)
    assert overlap.check_unseen(run, "en", srcs, refs, allow=True) == 2
    assert overlap.check_unseen(run, "en", srcs[:1], refs[:1], allow=False) == 0


def test_what_the_first_run_of_a_chain_was_trained_on_stays_known(run: Path, tmp_path: Path) -> None:
    earlier = run
    for number, pair in enumerate([("Second.", "第二。"), ("Third.", "第三。")]):
        clean = write_keys(tmp_path / f"clean {number}", [pair])
        later = tmp_path / f"run {number}"
        later.mkdir()
        NORMALISER.save(later / "normalisation.json")
        overlap.keep_keys(clean, ["en", "zh"], later, earlier)
        overlap.keep_keys(clean, ["en", "zh"], later)  # Resumed without the option.
        earlier = later
    srcs = ["Hello there.", "Second.", "Third.", "Fourth."]
    assert overlap.seen(earlier, "en", srcs, [["无。"]] * 4).tolist() == [True, True, True, False]


def test_a_run_with_its_columns_the_other_way_round_is_refused_to_begin_with(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="columns en, zh, this corpus has zh, en"):
        overlap.keep_keys(tmp_path / "clean", ["zh", "en"], tmp_path / "other", run)


def test_a_training_knows_all_its_text_and_warns_of_a_test_set_that_its_first_weights_were_trained_on(
    paths, tmp_path, caplog
) -> None:
    train_model(settings("train.max_steps=1"), at(paths, tmp_path / "first"), ALONE)
    srcs, tgts = (read_lines(paths.clean / f"train.{lang}") for lang in ("en", "zh"))
    assert overlap.seen(tmp_path / "first", "en", srcs, [["无"]] * len(srcs)).all()
    assert overlap.seen(tmp_path / "first", "zh", tgts, [["x"]] * len(tgts)).all()
    clean = tmp_path / "clean"
    shutil.copytree(paths.clean, clean, ignore=shutil.ignore_patterns("bpe", "encode", "run*"))
    other = {"en": "Quite another line.", "zh": "完全不同。"}
    for lang in ("en", "zh"):
        rest = read_lines(clean / f"test.{lang}")[1:]
        write_lines(clean / f"test.{lang}", [other[lang], *rest])
    write_keys(clean, [("Unrelated.", "无关。")])
    config = settings("train.max_steps=1")
    train_model(config, replace(at(paths, tmp_path / "second"), clean=clean), ALONE, init_from=tmp_path / "first")
    assert "were trained on 4 of the 5 lines of test" in caplog.text
    assert "were trained on 9 of the 9 lines of dev" in caplog.text


@pytest.mark.slow
def test_eval_refuses_a_test_set_that_changed_raw_files_have_mixed_with_training_text(tmp_path: Path) -> None:
    folder = fresh_clone(tmp_path)
    nmt(folder, "run", "-c", "tiny.yaml")
    first = json.loads(nmt(folder, "eval", "--json").stdout)
    assert first["trained_on"] == 0
    (clean,) = (folder / "data/mini").glob("clean-*")
    raw, tested = folder / "data/mini/raw/mini.txt", read_lines(clean / "test.en")
    rows = raw.read_bytes().split(b"\n")
    # Other sentences take the place of those that were tested, and the run was trained on them.
    raw.write_bytes(b"\n".join(row for row in rows if row.split(b"\t")[0].decode(errors="replace") not in tested))
    assert "clean: " in nmt(folder, "eval", code=1).stderr
    nmt(folder, "clean", "-c", "tiny.yaml", "--set", "clean.seed=1")
    told = nmt(folder, "eval", code=1).stderr
    assert "runs/tiny.en-zh was trained on" in told
    assert "this is another test set than its own" in told
    assert "--allow-overlap" in told
    (test,) = (path for path in (folder / "data/mini").glob("clean-*") if path != clean)
    assert "was trained on" in nmt(folder, "eval", str(test / "test.zh"), code=1).stderr
    allowed = json.loads(nmt(folder, "eval", "--allow-overlap", "--json").stdout)
    assert allowed["trained_on"] > 0
    assert "that the run was trained on" in nmt(folder, "eval", "--allow-overlap").stdout
    # What was allowed once is not allowed for ever, though the score is there.
    assert "--allow-overlap" in nmt(folder, "eval", code=1).stderr


@given(st.lists(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9), max_size=20), min_size=1, max_size=4))
def test_merged_keys_are_those_of_all_each_once(several: list[list[int]]) -> None:
    arrays = [np.array(sorted(keys), dtype="<u8") for keys in several]
    found = overlap._merged(arrays)
    assert found.tolist() == sorted(set().union(*several))
    assert found.dtype == np.uint64


def test_the_keys_of_a_run_are_eight_bytes_a_sentence(run: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in (RunDir(run).train_keys).iterdir()}
    assert sizes == {"en.keys": 16, "zh.keys": 16}
    assert np.all(np.diff(np.fromfile(RunDir(run).train_keys / "en.keys", "<u8")) > 0)
