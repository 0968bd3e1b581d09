"""The whole stage: raw files in, sets, references, attributions, rejected rows and a report out."""

import dataclasses
import json
import os
import random
from pathlib import Path

import numpy as np
import opencc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nmt.config import CleanConfig
from nmt.corpus import Normaliser, clean_corpus, parallel, print_report, reading
from nmt.corpus.cleaning import clean_chunk
from nmt.corpus.reading import Chunk
from nmt.corpus.splitting import sentence_key
from nmt.errors import DataError
from nmt.text import read_lines

SMALL = CleanConfig(dev_size=12, test_size=10)
NAMES = ("train", "dev", "test")


def sentences(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Pairs that share sentences on both sides, as real corpora have them."""
    rng = random.Random(seed)
    who = [("Tom", "湯姆"), ("Mary", "玛丽"), ("She", "她"), ("He", "他"), ("My aunt", "我姑姑")]
    what = [
        ("reads", "看书"),
        ("reads", "读书"),
        ("sleeps", "睡觉"),
        ("went to bed", "睡觉"),
        ("left", "走了"),
        ("came", "來了"),
    ]
    pairs = []
    for _ in range(count):
        (a, b), (c, d) = rng.choice(who), rng.choice(what)
        k = rng.randrange(count // 4)
        pairs.append((f"{a} {c} on day {k}.", f"{b}在第{k}天{d}。"))
    return pairs


def write_tsv(path: Path, pairs: list[tuple[str, str]], attribution: bool = True) -> Path:
    lines = ("\t".join((*pair, f"by author {n}") if attribution else pair) for n, pair in enumerate(pairs, 1))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")
    return path


def clean(folder: Path, pairs: list[tuple[str, str]], settings: CleanConfig = SMALL, workers: int = 1):
    folder.mkdir(exist_ok=True, parents=True)
    out = folder / "out"
    out.mkdir()
    return clean_corpus({"x": (write_tsv(folder / "x.tsv", pairs),)}, settings, out, workers), out


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def pairs_of(out: Path, name: str) -> list[tuple[str, str]]:
    return list(zip(read_lines(out / f"{name}.en"), read_lines(out / f"{name}.zh"), strict=True))


def adds_up(report) -> bool:
    dropped = sum(entry["rows"] for entry in report["dropped"].values())
    held = report["further_references"]
    made = sum(report["sets"].values()) if report["split"] else report["sets"]["train"]
    return report["input"] == dropped + report["kept"] and report["kept"] == made + held


def test_every_row_is_in_a_set_set_aside_or_rejected_with_its_reason(tmp_path):
    pairs = [*sentences(500), ("", "空"), ("copy", "copy"), ("no han", "none"), *sentences(500)[:20]]
    report, out = clean(tmp_path, pairs)
    assert adds_up(report)
    rejected = [line.split("\t") for line in read_lines(out / "rejected.tsv")]
    assert rejected[0] == ["reason", "source", "line", "en", "zh"]
    by_reason = {reason: entry["rows"] for reason, entry in report["dropped"].items()}
    assert len(rejected) - 1 == sum(by_reason.values())
    assert {reason: sum(row[0] == reason for row in rejected) for reason in by_reason} == by_reason
    assert ["empty", "x", "501", "", "空"] in rejected
    assert by_reason["duplicate"] >= 20
    assert not list(out.glob("*.part"))
    assert json.loads((out / "report.json").read_text(encoding="utf-8")) == report


def test_no_sentence_of_a_held_out_set_is_in_another_set(tmp_path):
    report, out = clean(tmp_path, sentences(600))
    keys = {
        name: [{sentence_key(side) for side in column} for column in zip(*pairs_of(out, name), strict=True)]
        for name in NAMES
    }
    for one, other in (("train", "dev"), ("train", "test"), ("dev", "test")):
        for side in (0, 1):
            assert not keys[one][side] & keys[other][side]
    assert report["leak"] == {"dev": 0, "test": 0, "between": 0}
    assert report["split"]["random_leak"]["either"] > 0.05


def test_dev_and_test_are_in_the_order_of_a_hash_and_not_of_the_file(tmp_path):
    _, out = clean(tmp_path, [(f"Number {n} is here.", f"第{n}号在这里。") for n in range(400)])
    numbers = [int(en.split()[1]) for en, _ in pairs_of(out, "dev")]
    assert numbers != sorted(numbers)


def test_references_are_all_translations_of_the_same_sentence_its_own_first(tmp_path):
    report, out = clean(tmp_path, sentences(600))
    kept = {name: pairs_of(out, name) for name in NAMES}
    assert report["further_references"] > 0
    every = [(row[0], row[1]) for row in sentences(600)]
    normalise = Normaliser.load(out / "normalisation.json")
    several = 0
    for name in ("dev", "test"):
        for lang, own, shared in (("zh", 1, 0), ("en", 0, 1)):
            for pair, line in zip(kept[name], read_lines(out / f"{name}.refs.{lang}"), strict=True):
                references = line.split("\t")
                assert references[0] == pair[own]
                wanted = {
                    normalise(row[own], lang)
                    for row in every
                    if sentence_key(row[shared]) == sentence_key(pair[shared])
                }
                assert set(references) == wanted
                several += len(references) > 1
    assert several > 0


def test_attributions_stay_beside_their_rows(tmp_path):
    pairs = list(dict.fromkeys(sentences(400)))
    _, out = clean(tmp_path, pairs)
    normalise = Normaliser.load(out / "normalisation.json")
    for name in NAMES:
        for pair, author in zip(pairs_of(out, name), read_lines(out / f"{name}.attribution"), strict=True):
            en, zh = pairs[int(author.removeprefix("by author ")) - 1]
            assert pair == (normalise(en, "en"), normalise(zh, "zh"))


def test_without_attributions_there_is_no_such_file_and_the_table_says_so(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    report = clean_corpus({"x": (write_tsv(tmp_path / "x.txt", sentences(400), attribution=False),)}, SMALL, out)
    assert not list(out.glob("*.attribution"))
    assert any("no attribution" in line for line in print_report(report))


def test_cleaning_clean_text_changes_nothing(tmp_path):
    report, out = clean(tmp_path / "one", sentences(500))
    again, out2 = clean(tmp_path / "two", [pair for name in NAMES for pair in pairs_of(out, name)])
    assert not again["dropped"]
    assert again["changed"] == {"en": 0, "zh": 0}
    assert sorted(pair for name in NAMES for pair in pairs_of(out2, name)) == sorted(
        pair for name in NAMES for pair in pairs_of(out, name)
    )
    assert report["input"] > again["input"]


def test_the_files_are_the_same_for_any_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK_ROWS", 50)
    pairs = [*sentences(400), ("", ""), ("same", "same")]
    one = clean(tmp_path / "one", pairs, workers=1)
    two = clean(tmp_path / "two", pairs, workers=2)
    assert one[0] == two[0]
    assert contents(one[1]) == contents(two[1])


def test_a_small_corpus_stays_in_one_process():
    assert parallel.worker_count(parallel.SMALL - 1, None) == 1
    assert parallel.worker_count(parallel.SMALL, None) >= 1
    assert parallel.worker_count(1, 3) == 3


def test_results_come_in_order_and_few_chunks_wait_at_a_time():
    taken = []

    def items():
        for n in range(40):
            taken.append(n)
            yield -n

    with parallel.Workers(2) as pool:
        for n, found in enumerate(pool.map(abs, items())):
            assert found == n
            assert len(taken) <= n + 2 * 2 + 1


def die(_: int) -> int:
    os._exit(9)


def test_a_process_that_dies_is_told_and_not_waited_for():
    with parallel.Workers(2) as pool, pytest.raises(DataError, match="memory"):
        list(pool.map(die, [1, 2, 3]))


def test_sources_are_counted_apart_and_may_have_two_files(tmp_path):
    pairs = sentences(300)
    (tmp_path / "b.en").write_text("".join(f"{en}\n" for en, _ in sentences(100, seed=1)))
    (tmp_path / "b.zh").write_text("".join(f"{zh}\n" for _, zh in sentences(100, seed=1)), encoding="utf-8")
    sources = {"a": (write_tsv(tmp_path / "a.tsv", pairs),), "b": (tmp_path / "b.en", tmp_path / "b.zh")}
    out = tmp_path / "out"
    out.mkdir()
    report = clean_corpus(sources, SMALL, out)
    assert adds_up(report)
    for name, rows in (("a", 300), ("b", 100)):
        source = report["sources"][name]
        assert source["input"] == rows == source["kept"] + sum(source["dropped"].values())
    assert [file["file"] for file in report["sources"]["b"]["files"]] == ["b.en", "b.zh"]


def test_sources_with_their_chinese_in_different_columns_are_refused(tmp_path):
    sources = {
        "a": (write_tsv(tmp_path / "a.tsv", sentences(300)),),
        "b": (write_tsv(tmp_path / "b.tsv", [(zh, en) for en, zh in sentences(300)]),),
    }
    with pytest.raises(DataError, match="different columns"):
        clean_corpus(sources, dataclasses.replace(SMALL, columns=("qaa", "qab")), tmp_path)


def test_the_script_of_the_text_decides_and_not_the_name_of_the_language(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    settings = dataclasses.replace(SMALL, columns=("qaa", "qab"))
    report = clean_corpus({"a": (write_tsv(tmp_path / "a.tsv", sentences(400)),)}, settings, out)
    assert report["han"] == {"qaa": False, "qab": True}
    assert "湯" not in (out / "train.qab").read_text(encoding="utf-8")


def test_a_corpus_without_a_han_side_is_cleaned_too(tmp_path):
    pairs = [(f"The house number {n} is old.", f"La maison numéro {n} est vieille.") for n in range(300)]
    out = tmp_path / "out"
    out.mkdir()
    report = clean_corpus(
        {"a": (write_tsv(tmp_path / "a.tsv", pairs),)}, dataclasses.replace(SMALL, columns=("en", "fr")), out
    )
    assert report["kept"] == 300
    assert report["han"] == {"en": False, "fr": False}


# ── dev and test given as files ─────────────────────────────────────────────────────────────────────────────────────


def given_sets(tmp_path: Path, dev: list[tuple[str, str]], test: list[tuple[str, str]]) -> CleanConfig:
    for name, rows in (("dev", dev), ("test", test)):
        for side, lang in enumerate(("en", "zh")):
            text = "".join(f"{row[side]}\n" for row in rows)
            (tmp_path / f"my{name}.{lang}").write_text(text, encoding="utf-8", newline="")
    return dataclasses.replace(
        SMALL,
        **{name: tuple(str(tmp_path / f"my{name}.{lang}") for lang in ("en", "zh")) for name in ("dev", "test")},
    )


def test_given_sets_are_kept_byte_for_byte_and_training_rows_that_share_a_sentence_go(tmp_path):
    pairs = list(dict.fromkeys(sentences(500)))
    held = [(pairs[3][0].upper(), "湯姆 來了 !"), ("Something else…", pairs[9][1] + "  "), ("A &amp; b", "甲和乙")]
    settings = given_sets(tmp_path, held[:2], held[2:])
    report, out = clean(tmp_path, [*pairs, ("A & b.", "丙")], settings)
    assert pairs_of(out, "dev") == held[:2]
    assert pairs_of(out, "test") == held[2:]
    gone = [pair for pair in pairs if pair[0] == pairs[3][0] or sentence_key(pair[1]) == sentence_key(pairs[9][1])]
    assert report["dropped"]["held_out"]["rows"] == len(gone) + 1
    assert report["leak"] == {"dev": 0, "test": 0, "between": 0}
    assert adds_up(report)
    assert report["split"] is None
    assert any("were left out" in line for line in print_report(report))


def test_references_of_a_given_set_come_from_the_set_itself(tmp_path):
    held = [("Hello there.", "你好。"), ("Hello there!", "您好。"), ("Bye.", "再见。")]
    _, out = clean(tmp_path, sentences(200), given_sets(tmp_path, held, [("Good night.", "晚安。")]))
    assert read_lines(out / "dev.refs.zh") == ["你好。\t您好。", "您好。\t你好。", "再见。"]
    assert read_lines(out / "dev.refs.en") == ["Hello there.", "Hello there!", "Bye."]


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "empty"), ("one column\n", "line 1 has 1 columns"), ("你好\thello\n", "in the order of clean.columns")],
)
def test_a_given_set_that_is_none_is_refused(tmp_path, text, said):
    (tmp_path / "dev.tsv").write_text(text, encoding="utf-8")
    settings = dataclasses.replace(SMALL, dev=(str(tmp_path / "dev.tsv"),), test=(str(tmp_path / "dev.tsv"),))
    with pytest.raises(DataError, match=said):
        clean(tmp_path, sentences(100), settings)


def test_a_corpus_that_is_its_own_test_set_leaves_nothing_to_train_on(tmp_path):
    write_tsv(tmp_path / "same.tsv", sentences(100))
    settings = dataclasses.replace(SMALL, dev=(str(tmp_path / "same.tsv"),), test=(str(tmp_path / "same.tsv"),))
    with pytest.raises(DataError, match="none is left to train on"):
        clean(tmp_path, sentences(100), settings)


# ── any text at all ─────────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.binary(max_size=30), st.sampled_from([b"\t", b"", b"\t\t", b"\t\xff"]), st.text(max_size=30)))
)
def test_no_line_makes_the_cleaner_fail_or_lose_count(lines):
    raw = [(left.replace(b"\n", b"") + tab + right.replace("\n", "").encode(),) for left, tab, right in lines]
    normaliser = Normaliser("simplified", {"en": False, "zh": True})
    found = clean_chunk(Chunk(0, 1, raw), SMALL, normaliser, ("x",))
    assert found.kept.count(b"\n") + found.rejected.count(b"\n") == len(raw) == found.counts["input"]
    assert len(found.left) == len(found.right) == 8 * found.kept.count(b"\n")
    assert all(row.count(b"\t") == 4 for row in (found.kept + found.rejected).split(b"\n")[:-1])


PIECES = [
    "<b>",
    "</b>",
    "(",
    ")",
    "（",
    "）",
    "注：",
    "_",
    "&",
    "V",
    "(_V)",
    "?verb:",
    "Note",
    '"',
    "x",
    "=",
    "/>",
    "<i a=1>",
]


@settings(deadline=None)
@given(
    *(st.lists(st.sampled_from([*PIECES, *own]), max_size=12).map("".join) for own in (("a b ", "Tom"), ("中", "文，")))
)
def test_a_kept_row_is_kept_as_it_is_when_it_is_cleaned_again(en, zh):
    normaliser = Normaliser("simplified", {"en": False, "zh": True})
    once = clean_chunk(Chunk(0, 2, [(f"Some words {en}\t一些话{zh}".encode(),)]), SMALL, normaliser, ("x",))
    if once.kept:
        row = once.kept.split(b"\t", 2)[2]
        assert clean_chunk(Chunk(0, 2, [(row,)]), SMALL, normaliser, ("x",)).kept == once.kept


@settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(st.tuples(st.text(max_size=12), st.text("中文你好国國，。,.!? \u200b", max_size=12)), max_size=15))
def test_odd_rows_among_good_ones_never_break_the_sums(tmp_path_factory, rows):
    rows = [tuple(side.replace("\n", " ").replace("\t", " ") for side in row) for row in rows]
    report, _ = clean(tmp_path_factory.mktemp("c"), [*rows, *sentences(300)])
    assert adds_up(report)
    assert not any(report["leak"].values())


# ── the real corpus ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def cmn(foreign_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("cmn")
    return clean_corpus({"cmn": (foreign_data / "cmn" / "cmn.txt",)}, CleanConfig(), out), out


def test_human_translations_are_hardly_ever_dropped(cmn):
    report, out = cmn
    assert report["input"] == len(read_lines(out / "rejected.tsv")) - 1 + report["kept"]
    assert report["kept"] > 0.98 * report["input"]
    assert adds_up(report)


def test_the_real_split_has_the_sizes_asked_for_and_no_leak_where_a_random_one_has_much(cmn):
    report, out = cmn
    assert [len(read_lines(out / f"{name}.en")) for name in NAMES[1:]] == [1000, 1000]
    train, test = (pairs_of(out, name) for name in ("train", "test"))
    for side in (0, 1):
        seen = {"".join(c for c in row[side].casefold() if c.isalnum()) for row in train}
        assert not any("".join(c for c in row[side].casefold() if c.isalnum()) in seen for row in test)
    assert report["leak"] == {"dev": 0, "test": 0, "between": 0}
    assert 0.05 < report["split"]["random_leak"]["en"] < 0.15
    assert 0.15 < report["split"]["random_leak"]["zh"] < 0.25


def test_lengths_in_dev_and_test_are_those_of_the_corpus(cmn):
    _, out = cmn
    means = {name: np.mean([len(en.split()) for en, _ in pairs_of(out, name)]) for name in NAMES}
    assert means["test"] == pytest.approx(means["train"], rel=0.05)
    assert means["dev"] == pytest.approx(means["train"], rel=0.05)


def test_nearly_half_of_the_real_lines_have_traditional_characters_and_none_after_cleaning(cmn):
    report, out = cmn
    script = report["script"]
    assert (script["traditional"] + script["mixed"]) / sum(script.values()) == pytest.approx(0.456, abs=0.005)
    t2s = opencc.OpenCC("t2s")
    assert all(t2s.convert(line) == line for line in read_lines(out / "train.zh"))


def test_simplified_text_agrees_with_a_conversion_made_elsewhere_but_for_marks_spaces_and_one_suffix(foreign_data):
    normalise = Normaliser("simplified", {"en": False, "zh": True})
    split = foreign_data / "cmn" / "split"
    found = [normalise(line, "zh") for line in read_lines(split / "dev.zh")]
    expected = read_lines(split / "dev.zhs")
    assert sum(a == b for a, b in zip(found, expected, strict=True)) > 0.9 * len(found)
    bare = [
        ["".join(c for c in text if c.isalnum()).replace("著", "着") for text in (a, b)]
        for a, b in zip(found, expected, strict=True)
    ]
    assert all(a == b for a, b in bare)


def test_the_fixed_split_given_as_files_already_has_no_shared_sentence(foreign_data, tmp_path):
    split = foreign_data / "cmn" / "split"
    files = {name: tuple(str(split / f"{name}.{ending}") for ending in ("en", "zhs")) for name in NAMES}
    out = tmp_path / "out"
    out.mkdir()
    settings = CleanConfig(dev=files["dev"], test=files["test"])
    report = clean_corpus({"train": tuple(map(Path, files["train"]))}, settings, out)
    assert "held_out" not in report["dropped"]
    assert report["leak"] == {"dev": 0, "test": 0, "between": 0}
    assert read_lines(out / "test.zh") == read_lines(split / "test.zhs")
