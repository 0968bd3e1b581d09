"""The whole stage: raw files in, sets, references, attributions, rejected rows and a report out."""

import dataclasses
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import opencc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from little import nmt
from nmt.config import CleanConfig, Config, DataConfig
from nmt.corpus import Normaliser, NothingLeft, clean_corpus, cleaning, parallel, print_report, reading, sets
from nmt.corpus.cleaning import clean_chunk
from nmt.corpus.keys import leak_key, reference_key
from nmt.corpus.reading import Chunk
from nmt.errors import DataError
from nmt.io import read_lines
from nmt.pipeline import engine, stages

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
        name: [{leak_key(side) for side in column} for column in zip(*pairs_of(out, name), strict=True)]
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
                    if reference_key(row[shared]) == reference_key(pair[shared])
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


def with_columns(tmp_path: Path, *columns: str, **changes: str) -> tuple[dict[str, Any], str]:
    """The report, and the text of all sets in the second column, of a corpus whose lines are in both scripts."""
    out = tmp_path / "out"
    out.mkdir()
    settings = dataclasses.replace(SMALL, columns=columns, **changes)
    report = clean_corpus({"a": (write_tsv(tmp_path / "a.tsv", sentences(400)),)}, settings, out)
    return report, "".join((out / f"{name}.{columns[1]}").read_text(encoding="utf-8") for name in NAMES)


@pytest.mark.parametrize("lang", ["zh", "zh-CN", "zh_SG", "zh-Hans", "zh-Hans-HK", "zho", "cmn", "wuu", "lzh"])
def test_chinese_is_simplified_unless_its_code_says_traditional(tmp_path, lang):
    report, text = with_columns(tmp_path, "en", lang)
    assert report["zh_script"] == {lang: "simplified"}
    assert "汤姆" in text
    assert not set("湯來") & set(text)


@pytest.mark.parametrize(
    "lang", ["zh-Hant", "zh-TW", "zh-HK", "zh-MO", "zh_tw", "zho-Hant", "cmn-Hant", "yue", "zh-yue"]
)
def test_chinese_of_a_traditional_code_is_traditional(tmp_path, lang):
    report, text = with_columns(tmp_path, "en", lang)
    assert report["zh_script"] == {lang: "traditional"}
    assert "湯姆" in text
    assert not set("汤书觉玛丽读来") & set(text) - set("麗")
    assert any(line.endswith("policy traditional") for line in print_report(report))


def test_a_given_policy_is_stronger_than_the_code(tmp_path):
    for number, (lang, policy) in enumerate([("zh-TW", "simplified"), ("zh", "traditional"), ("zh-Hant", "keep")]):
        (tmp_path / str(number)).mkdir()
        report, text = with_columns(tmp_path / str(number), "en", lang, zh_script=policy)
        assert report["zh_script"] == {lang: policy}
        assert ("汤" in text, "湯" in text) == (policy == "simplified", policy != "simplified")


@pytest.mark.parametrize("lang", ["ja", "jpn", "ja-JP", "ko", "qab"])
@pytest.mark.parametrize("policy", ["auto", "simplified", "filter"])
def test_what_is_not_chinese_is_never_converted_though_it_is_written_in_han(tmp_path, lang, policy):
    report, text = with_columns(tmp_path, "en", lang, zh_script=policy)
    assert report["han"] == {"en": False, lang: True}
    assert report["zh_script"] == {}
    assert report["script"] == dict.fromkeys(("simplified", "traditional", "mixed", "neutral"), 0)
    assert "湯姆" in text
    assert "看书" in text


def test_two_chinese_sides_have_each_its_script(tmp_path):
    pairs = [(f"第{n}天他來了，{n}号房间开着門。", f"第{n}天他来了，{n}號房間開著門。") for n in range(300)]
    out = tmp_path / "out"
    out.mkdir()
    settings = dataclasses.replace(SMALL, columns=("zh-Hans", "zh-Hant"), drop_copies=False)
    report = clean_corpus({"a": (write_tsv(tmp_path / "a.tsv", pairs),)}, settings, out)
    assert report["zh_script"] == {"zh-Hans": "simplified", "zh-Hant": "traditional"}
    assert pairs_of_columns(out, settings.columns) == {
        (f"第{n}天他来了，{n}号房间开着门。", f"第{n}天他來了，{n}號房間開著門。") for n in range(300)
    }


def pairs_of_columns(out: Path, columns: tuple[str, ...]) -> set[tuple[str, str]]:
    return {
        pair for name in NAMES for pair in zip(*(read_lines(out / f"{name}.{lang}") for lang in columns), strict=True)
    }


def test_a_chinese_side_is_converted_beside_a_japanese_one(tmp_path):
    pairs = [(f"我在第{n}號房間學習。", f"{n}号室で学習、勉強しました。") for n in range(300)]
    for number, columns in enumerate([("zh", "ja"), ("ja", "zh")]):
        out = tmp_path / str(number)
        out.mkdir()
        rows = pairs if columns[0] == "zh" else [(ja, zh) for zh, ja in pairs]
        settings = dataclasses.replace(SMALL, columns=columns)
        report = clean_corpus({"a": (write_tsv(tmp_path / f"{number}.tsv", rows),)}, settings, out)
        assert report["zh_script"] == {"zh": "simplified"}
        assert set(read_lines(out / "train.zh")) < {f"我在第{n}号房间学习。" for n in range(300)}
        assert set(read_lines(out / "train.ja")) < {ja for _, ja in pairs}


def test_japanese_is_measured_and_kept_as_japanese(tmp_path):
    pairs = [(f"Yes, I studied in room {n}.", f"はい、{n}号室で勉強しました。") for n in range(150)]
    pairs += [(f"Thank you very much, number {n}.", f"{n}ばん、ありがとうございます!") for n in range(150)]
    out = tmp_path / "out"
    out.mkdir()
    settings = dataclasses.replace(SMALL, columns=("en", "ja"))
    report = clean_corpus({"a": (write_tsv(tmp_path / "a.tsv", pairs),)}, settings, out)
    assert report["kept"] == 300
    assert pairs_of_columns(out, settings.columns) == set(pairs)


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
    gone = [pair for pair in pairs if pair[0] == pairs[3][0] or leak_key(pair[1]) == leak_key(pairs[9][1])]
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
    [("", "empty"), ("one column\n", "no line with two columns"), ("你好\thello\n", "in the order of clean.columns")],
)
def test_a_given_set_that_is_none_is_refused(tmp_path, text, said):
    (tmp_path / "dev.tsv").write_text(text, encoding="utf-8")
    settings = dataclasses.replace(SMALL, dev=(str(tmp_path / "dev.tsv"),), test=(str(tmp_path / "dev.tsv"),))
    with pytest.raises(DataError, match=said):
        clean(tmp_path, sentences(100), settings)


def test_a_corpus_that_is_its_own_test_set_leaves_nothing_to_train_on(tmp_path):
    write_tsv(tmp_path / "same.tsv", sentences(100))
    settings = dataclasses.replace(SMALL, dev=(str(tmp_path / "same.tsv"),), test=(str(tmp_path / "same.tsv"),))
    with pytest.raises(
        NothingLeft, match=r"no pair is left to train on. Dropped of 100 rows: 93 held_out \(.*; 7 dupl"
    ):
        clean(tmp_path, sentences(100), settings)
    rejected = [line.split("\t")[0] for line in read_lines(tmp_path / "out" / "rejected.tsv")]
    assert (rejected.count("held_out"), rejected.count("duplicate")) == (93, 7)


# ── nothing left ────────────────────────────────────────────────────────────────────────────────────────────────────

BAD = {
    "ratio": ("One two three four five six seven eight nine.", "好吧。"),
    "no_han": ("No Han here", "none at all"),
    "copy": ("相同的", "相同的"),
    "empty": ("Nothing", ""),
    "script": ("Whose book is it?", "這是誰的書？"),
}


@pytest.mark.parametrize("reason", BAD)
def test_when_a_rule_drops_all_rows_the_reason_is_what_is_said_and_the_rows_stay(tmp_path, reason):
    out = tmp_path / "out"
    out.mkdir()
    # Others are bad for two reasons of their own: the columns have to look like those of a corpus.
    rows = [BAD[reason]] * 200 + [("?", "第一号在。")] * 110 + [("It is \ufffd.", "第二号在。")] * 111
    (tmp_path / "x.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(NothingLeft) as caught:
        clean_corpus({"x": (tmp_path / "x.tsv",)}, dataclasses.replace(SMALL, zh_script="filter"), out)
    said = str(caught.value)
    assert said.startswith("no pair is left to train on. Dropped of 421 rows: 200 ")
    assert f" {reason} (" in said
    assert "; 111 damaged (characters lost to a wrong encoding, clean.drop_damaged); 110 no_letter (a si" in said
    assert "test_size" not in said
    rejected = [line.split("\t")[0] for line in read_lines(out / "rejected.tsv")]
    assert (rejected.count(reason), rejected.count("no_letter"), rejected.count("damaged")) == (200, 110, 111)


def test_when_rules_leave_too_few_rows_to_split_both_are_said(tmp_path):
    with pytest.raises(NothingLeft) as caught:
        clean(tmp_path, [*sentences(30), *[BAD["ratio"]] * 500])
    assert "clean.test_size is 10, more than a tenth of" in str(caught.value)
    assert "Dropped of 530 rows: 500 ratio (too few or too many words for the units, clean.min_ratio, max_rati" in str(
        caught.value
    )
    assert len(read_lines(tmp_path / "out" / "rejected.tsv")) > 500


def test_a_corpus_that_is_only_small_is_told_so_and_no_reason_is_made_up(tmp_path):
    with pytest.raises(DataError, match="too small to be split") as caught:
        clean(tmp_path, [(f"Number {n} is here.", f"第{n}号在这里。") for n in range(5)])
    assert "ropped" not in str(caught.value)


def test_the_stage_leaves_the_dropped_rows_in_the_corpus_folder_and_takes_them_away_after_a_success(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    raw = tmp_path / "data" / "mine" / "raw"
    raw.mkdir(parents=True)
    Path("mine.yaml").write_text("data: {corpus: mine}\nclean: {dev_size: 5, test_size: 5}\n")
    words = ("clean", "-c", "mine.yaml")
    write_tsv(raw / "x.tsv", [BAD["ratio"]] * 300)
    ended = nmt(*words)
    assert ended.code == 1
    assert "300 ratio" in ended.told
    assert "Each dropped row is in data/mine/rejected.tsv." in ended.told
    assert len(read_lines("data/mine/rejected.tsv")) == 301
    assert [path.name for path in Path("data/mine").iterdir() if path.name.startswith((".", "clean"))] == []
    write_tsv(raw / "x.tsv", [*sentences(300), *[BAD["ratio"]] * 300])
    assert nmt(*words).code == 0
    assert not Path("data/mine/rejected.tsv").exists()


# ── files that change ───────────────────────────────────────────────────────────────────────────────────────────────


def append(path: Path) -> None:
    with open(path, "ab") as stream:
        stream.write("More.\t更多。\n".encode())


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def edit(path: Path) -> None:
    """Same size, same time of the last change."""
    facts = path.stat()
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def changing(monkeypatch, changes):
    """Let `changes` happen between the look through a source and its cleaning."""
    looked = cleaning.inspect

    def inspect(files, settings):
        facts = looked(files, settings)
        changes(*files)
        return facts

    monkeypatch.setattr(cleaning, "inspect", inspect)


@pytest.mark.parametrize("change", [append, cut, edit, Path.unlink])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_changes_while_it_is_cleaned_is_refused_by_name(tmp_path, monkeypatch, change, workers):
    changing(monkeypatch, change)
    with pytest.raises(
        DataError, match=r"x\.tsv(: No such| changed while it was being cleaned; run it again)|cannot read"
    ):
        clean(tmp_path, sentences(400), workers=workers)
    assert not (tmp_path / "out" / "report.json").exists()


@pytest.mark.parametrize("which", [0, 1, slice(None)])
@pytest.mark.parametrize("change", [append, cut, edit])
def test_aligned_files_of_which_one_or_both_change_are_refused(tmp_path, monkeypatch, change, which):
    def changes(*files):
        for path in files[which] if isinstance(which, slice) else (files[which],):
            change(path)

    changing(monkeypatch, changes)
    paths = (tmp_path / "a.en", tmp_path / "a.zh")
    for side, path in enumerate(paths):
        path.write_text("".join(f"{row[side]}\n" for row in sentences(400)), encoding="utf-8")
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"a\.en or .*a\.zh changed while it was being cleaned"):
        clean_corpus({"a": paths}, SMALL, tmp_path / "out")


def test_a_file_that_is_only_touched_is_cleaned(tmp_path, monkeypatch):
    changing(monkeypatch, lambda path: os.utime(path, (1, 1)))
    assert adds_up(clean(tmp_path, sentences(400))[0])


@pytest.mark.parametrize("change", [append, cut, edit])
def test_a_given_set_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, change):
    write_tsv(tmp_path / "set.tsv", [("Sit down 1.", "坐下1。"), ("Get up 1.", "起来1。")])
    read = sets.read_aligned

    def read_a_changing_file(path):
        found = read(path)
        change(path)
        return found

    monkeypatch.setattr(sets, "read_aligned", read_a_changing_file)
    path = str(tmp_path / "set.tsv")
    with pytest.raises(DataError, match=r"clean\.dev: .*set\.tsv changed while it was read"):
        clean(tmp_path, sentences(400), dataclasses.replace(SMALL, dev=(path,), test=(path,)))


def test_the_stage_refuses_files_that_are_not_those_whose_content_names_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = tmp_path / "data" / "mine" / "raw"
    raw.mkdir(parents=True)
    write_tsv(raw / "x.tsv", sentences(400))
    wanted = Config(data=DataConfig(corpus="mine"), clean=SMALL)
    stage = stages.build_stages(wanted)[0]
    append(raw / "x.tsv")
    with pytest.raises(DataError, match=r"x\.tsv is not what it was when its hash was taken"):
        engine.act(stage)
    assert not stage.writes.exists()
    engine.act(stages.build_stages(wanted)[0])


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
    assert [len(keys) for keys in found.keys] == 3 * [8 * found.kept.count(b"\n")]
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
