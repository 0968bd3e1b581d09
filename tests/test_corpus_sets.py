"""The files of train, dev and test: references, whom to credit for them, and sets given in another form."""

import logging
from collections import defaultdict
from pathlib import Path

import pytest
import sacrebleu

from nmt.config import CleanConfig, Config, EvalConfig
from nmt.corpus import Normaliser, clean_corpus, print_report
from nmt.errors import DataError
from nmt.evaluation.test_set import evaluate_test, score_lines
from nmt.io import read_lines, write_lines
from nmt.runs.overlap import keep_keys

LANGS = ("en", "zh")
SETS = ("dev", "test")
VARIANTS = [
    (("It is {n}.5 kg.", "它重{n}.5公斤。"), ("It is {n}5 kg.", "它重{n}5公斤。")),
    (("Pay ${n}.50 now.", "现在付${n}.50。"), ("Pay ${n}50 now.", "现在付${n}50。")),
    (("It is -{n} here.", "这里-{n}度。"), ("It is {n} here.", "这里{n}度。")),
    (("Type {n}+3 now.", "现在输入{n}+3。"), ("Type {n}-3 now.", "现在输入{n}-3。")),
    (("Model {n} left.", "{n}号，你要回家。"), ("Model {n} left?", "{n}号，你要回家？")),
    (("We won {n}:2 then.", "我们当时{n}:2赢了。"), ("We won {n}2 then.", "我们当时{n}2赢了。")),
]


def cleaned(folder: Path, rows: list[tuple[str, ...]], **settings):
    write_lines(folder / "x.tsv", ("\t".join(row) for row in rows))
    out = folder / "out"
    out.mkdir()
    return clean_corpus({"x": (folder / "x.tsv",)}, CleanConfig(**settings), out, workers=1), out


def given(folder: Path, **sets: list[tuple[str, ...]]) -> dict[str, tuple[str]]:
    """`dev` and `test` as files, as settings."""
    for name, rows in sets.items():
        write_lines(folder / f"my{name}.tsv", ("\t".join(row) for row in rows))
    return {name: (str(folder / f"my{name}.tsv"),) for name in sets}


GOOD = [(f"Number {n} is here.", f"第{n}号在这里。") for n in range(100)]


# ── duplicates and references ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("variants", VARIANTS, ids=lambda variants: variants[0][0])
def test_rows_that_differ_in_a_number_a_sign_or_a_question_are_kept_apart_but_in_one_set(tmp_path, variants):
    rows = [tuple(side.format(n=n) for side in variant) for n in range(11, 71) for variant in variants]
    report, out = cleaned(tmp_path, rows, dev_size=6, test_size=6)
    assert report["split"]["groups"] == 60
    assert "duplicate" not in report["dropped"]
    assert report["further_references"] == 0
    assert report["dropped"]["held_out"]["rows"] == 12  # The other row of each held-out group.
    for name in SETS:
        for lang in LANGS:
            assert read_lines(out / f"{name}.refs.{lang}") == read_lines(out / f"{name}.{lang}")
    assert len((out / "rejected.tsv").read_text().split("\n")) == 14


@pytest.mark.parametrize("variants", VARIANTS, ids=lambda variants: variants[0][0])
def test_rows_of_a_given_set_that_differ_in_meaning_are_no_references_of_one_another(tmp_path, variants):
    rows = [tuple(side.format(n=7) for side in variant) for variant in variants]
    _, out = cleaned(tmp_path, GOOD, **given(tmp_path, dev=rows, test=rows))
    for lang in LANGS:
        assert read_lines(out / f"test.refs.{lang}") == read_lines(out / f"test.{lang}")


def test_rows_that_differ_in_case_width_script_or_a_full_stop_are_duplicates(tmp_path):
    rows = [("Go away!", "走開！"), ("go away", "走开"), ("Go away.", "走开 ！"), ("GO AWAY!", "“走开”。")]
    report, _ = cleaned(tmp_path, [*GOOD, *rows], dev_size=5, test_size=5)
    assert report["dropped"]["duplicate"]["rows"] == 3


def test_a_row_of_a_held_out_group_that_is_no_reference_is_rejected_with_its_reason(tmp_path):
    # A chain: the first and the last row of a group share no sentence.
    chains = [[(f"a {n} b", f"甲{n}乙"), (f"a {n} b", f"丙{n}丁"), (f"c {n} d", f"丙{n}丁")] for n in range(60)]
    report, out = cleaned(tmp_path, [row for chain in chains for row in chain], dev_size=6, test_size=6)
    rejected = [line.split("\t") for line in read_lines(out / "rejected.tsv")[1:]]
    references = sum(len(line.split("\t")) - 1 for name in SETS for line in read_lines(out / f"{name}.refs.en"))
    references += sum(len(line.split("\t")) - 1 for name in SETS for line in read_lines(out / f"{name}.refs.zh"))
    assert report["further_references"] == references
    assert {row[0] for row in rejected} == {"held_out"}
    assert len(rejected) + references == 24
    assert report["kept"] == sum(report["sets"].values()) + report["further_references"]


# ── whom to credit ──────────────────────────────────────────────────────────────────────────────────────────────────


def uncredited(out: Path, rows: list[tuple[str, str, str]]) -> list[str]:
    """Texts of any file of a set for which the attribution beside them names no row that has the text."""
    normalise = Normaliser.load(out / "normalisation.json")
    authors: dict[tuple[str, str], set[str]] = defaultdict(set)
    for *sides, author in rows:
        for lang, side in zip(LANGS, sides, strict=True):
            authors[lang, normalise(side, lang)].add(author)
    files = {lang: [(f"{name}.{lang}", f"{name}.attribution") for name in ("train", *SETS)] for lang in LANGS}
    for lang in LANGS:
        files[lang] += [(f"{name}.refs.{lang}", f"{name}.refs.{lang}.attribution") for name in SETS]
    wrong = []
    for lang, pairs in files.items():
        for texts, credits in pairs:
            for line, credit in zip(read_lines(out / texts), read_lines(out / credits), strict=True):
                for text, author in zip(line.split("\t"), credit.split("\t"), strict=True):
                    if author not in authors[lang, text]:
                        wrong.append(f"{texts}: {text}")
    return wrong


def test_every_text_of_every_set_has_its_attribution_beside_it(tmp_path):
    rows = [(f"He saw {n // 2} cats.", f"他看见了{n}只猫。", f"author {n}") for n in range(200)]
    rows += [(f"She saw {n} dogs.", f"她看见了{n // 3}只狗。", f"writer {n}") for n in range(200)]
    report, out = cleaned(tmp_path, rows, dev_size=10, test_size=10)
    assert report["further_references"] > 10
    assert uncredited(out, rows) == []
    first = [line.split("\t")[0] for line in read_lines(out / "test.refs.zh.attribution")]
    assert first == read_lines(out / "test.attribution")


def test_every_text_of_the_real_corpus_has_its_attribution_beside_it(foreign_data, tmp_path):
    path = foreign_data / "cmn" / "cmn.txt"
    clean_corpus({"cmn": (path,)}, CleanConfig(), tmp_path)
    assert uncredited(tmp_path, [tuple(line.split("\t")) for line in read_lines(path)]) == []


def test_references_of_a_given_set_keep_the_attributions_of_its_third_column(tmp_path):
    rows = [("Hello.", "你好。", "A"), ("Hello!", "您好。", "B"), ("Bye.", "再见。", "C"), ("Hello.", "你好。", "D")]
    _, out = cleaned(tmp_path, GOOD, **given(tmp_path, dev=rows, test=rows))
    assert read_lines(out / "test.refs.zh") == ["你好。\t您好。", "您好。\t你好。", "再见。", "你好。\t您好。"]
    assert read_lines(out / "test.refs.zh.attribution") == ["A\tB", "B\tA", "C", "D\tB"]
    assert read_lines(out / "test.refs.en.attribution") == ["A", "B", "C", "D"]


def test_a_text_that_one_row_has_without_and_another_with_an_attribution_has_it(tmp_path):
    rows = [("Hello.", "你好。", ""), ("Hello!", "你好。", "B"), ("Bye.", "再见。", "")]
    _, out = cleaned(tmp_path, GOOD, **given(tmp_path, dev=rows, test=rows))
    assert read_lines(out / "test.refs.zh.attribution") == ["B", "B", ""]
    assert read_lines(out / "test.refs.en.attribution") == ["\tB", "B\t", ""]


@pytest.mark.parametrize("shared", [("Hello there!", "您好！"), ("Hi.", "你好。"), ("HELLO THERE", "哈囉")])
def test_a_given_test_set_with_a_sentence_of_the_given_dev_set_is_warned_of(tmp_path, caplog, shared):
    dev, test = [("Hello there.", "你好。")], [("My horse eats.", "我的马在吃。")]
    report, _ = cleaned(tmp_path, GOOD, **given(tmp_path, dev=dev, test=[*test, shared]))
    line = "clean.test: 1 of its 2 rows share a sentence with the given dev set"
    assert line in caplog.text
    assert any(line in row for row in print_report(report))
    caplog.clear()
    (tmp_path / "apart").mkdir()
    report, _ = cleaned(tmp_path / "apart", GOOD, **given(tmp_path, dev=dev, test=test))
    assert "clean.test" not in caplog.text + "".join(print_report(report))


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("row", [("", "再见。"), ("Bye.", ""), ("Bye.", " \u3000"), (" ", "")])
def test_a_row_of_a_given_set_with_a_side_without_text_is_refused_in_either_form(tmp_path, aligned, row):
    rows = [("My horse eats.", "我的马在吃。"), ("Hello there.", "你好。"), row]
    files = given(tmp_path, dev=rows[:2], test=rows)
    if aligned:
        for lang, side in zip(LANGS, zip(*rows, strict=True), strict=True):
            write_lines(tmp_path / f"my.{lang}", side)
        files["test"] = (str(tmp_path / "my.en"), str(tmp_path / "my.zh"))
    with pytest.raises(DataError, match=r"clean\.test: .*, line 3 has a side without text"):
        cleaned(tmp_path, GOOD, **files)


def test_sets_without_attributions_have_no_such_files(tmp_path):
    _, out = cleaned(tmp_path, GOOD, dev_size=5, test_size=5)
    assert not list(out.glob("*.attribution"))


# ── given sets in another form than the training text ───────────────────────────────────────────────────────────────

TRADITIONAL = [
    ("Whose book is this?", "這是誰的書？"),
    ("He has come back.", "他回來了。"),
    ("It is hot.", "天氣很熱。"),
]
HALF_WIDTH = [("Is it good, Tom?", "好吗,汤姆?"), ("Come in!", "请进!"), ("No, thanks.", "不用,谢谢!")]
PLAIN = [("Is it good, Tom?", "好吗，汤姆？"), ("Come in!", "请进！"), ("No, thanks.", "不用，谢谢！")]
CURLY = [("Tom’s here, isn’t he?", "汤姆在，不是吗？"), ("“Come in”, said he.", "他说：“请进。”")]
FULL_WIDTH_ENGLISH = [("Is it good？", "好吗？"), ("Come in， Tom！", "请进，汤姆！")]


def told_of_form(caplog) -> list[str]:
    """All warnings but those about rows that dev and test have in common."""
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if "share a sentence with the given dev set" not in line]


@pytest.mark.parametrize(
    ("rows", "policy", "lang", "lines"),
    [
        (TRADITIONAL, "simplified", "zh", 3),
        (TRADITIONAL, "filter", "zh", 3),
        ([*TRADITIONAL, *PLAIN], "simplified", "zh", 3),
        (PLAIN, "traditional", "zh", 3),
        (HALF_WIDTH, "simplified", "zh", 3),
        (HALF_WIDTH, "keep", "zh", 3),
        (CURLY, "simplified", "en", 2),
        (FULL_WIDTH_ENGLISH, "keep", "en", 2),
    ],
)
def test_a_given_set_in_another_form_is_warned_of_with_its_share_and_what_a_perfect_translation_scores(
    tmp_path, caplog, rows, policy, lang, lines
):
    with caplog.at_level(logging.WARNING):
        report, out = cleaned(tmp_path, GOOD, **given(tmp_path, dev=PLAIN, test=rows), zh_script=policy)
    side = LANGS.index(lang)
    texts = [row[side] for row in rows]
    normalise = Normaliser("simplified" if policy == "filter" else policy, {"en": False, "zh": True})
    perfect = sacrebleu.corpus_bleu(
        [normalise(text, lang) for text in texts], [texts], tokenize="zh" if lang == "zh" else "13a"
    )
    found = report["reference_form"]["test"][lang]
    assert found["lines"] == lines
    assert found["share"] == lines / len(rows)
    assert found["bleu"] == pytest.approx(perfect.score)
    assert found["bleu"] < 80
    assert f"tok:{'zh' if lang == 'zh' else '13a'}" in found["signature"]
    said = [line for line in told_of_form(caplog) if "clean.test" in line]
    assert len(said) == 1
    assert f"{100 * lines / len(rows):.1f} % of the lines of {lang} ({lines})" in said[0]
    assert f"BLEU {perfect.score:.1f}" in said[0]
    assert any(said[0] in line for line in print_report(report))
    assert read_lines(out / f"test.{lang}") == texts


@pytest.mark.parametrize(
    ("rows", "policy"),
    [(PLAIN, "simplified"), (TRADITIONAL, "traditional"), (TRADITIONAL, "keep"), (PLAIN, "filter")],
)
def test_a_given_set_in_the_form_of_the_training_text_is_not_warned_of(tmp_path, caplog, rows, policy):
    with caplog.at_level(logging.WARNING):
        report, _ = cleaned(
            tmp_path,
            GOOD,
            **given(tmp_path, dev=PLAIN if policy != "traditional" else rows, test=rows),
            zh_script=policy,
        )
    assert report["reference_form"]["test"] == {}
    assert not told_of_form(caplog)


@pytest.mark.parametrize(
    ("lang", "rows", "told"),
    [
        ("zh-TW", TRADITIONAL, ""),
        ("zh-TW", PLAIN, "script: traditional; kind and width of marks"),
        ("yue", PLAIN, "script: traditional; kind and width of marks"),
        ("zh-SG", TRADITIONAL, "script: simplified; kind and width of marks"),
        ("ja", TRADITIONAL, ""),
    ],
)
def test_the_form_of_the_training_text_is_that_of_its_language(tmp_path, caplog, lang, rows, told):
    with caplog.at_level(logging.WARNING):
        report, _ = cleaned(tmp_path, GOOD, **given(tmp_path, dev=rows, test=rows), columns=("en", lang))
    assert (lang in report["reference_form"]["test"]) == bool(told)
    assert len([line for line in told_of_form(caplog) if "reference" in line]) == 2 * bool(told)
    assert all(told in line for line in told_of_form(caplog))


def test_spaces_that_no_score_sees_are_counted_and_not_warned_of(tmp_path, caplog):
    rows = [(f"{en} ", zh) for en, zh in PLAIN]
    with caplog.at_level(logging.WARNING):
        report, _ = cleaned(tmp_path, GOOD, **given(tmp_path, dev=PLAIN, test=rows))
    assert report["reference_form"]["test"]["en"]["lines"] == 3
    assert report["reference_form"]["test"]["en"]["bleu"] == pytest.approx(100)
    assert not told_of_form(caplog)


def test_a_split_made_here_is_always_in_the_form_of_the_training_text(tmp_path):
    assert cleaned(tmp_path, GOOD, dev_size=5, test_size=5)[0]["reference_form"] == {}


@pytest.mark.parametrize(("rows", "told"), [(TRADITIONAL, True), (PLAIN, False)])
def test_eval_says_what_a_perfect_translation_scores_against_references_in_another_form(tmp_path, rows, told):
    report, out = cleaned(tmp_path, GOOD, **given(tmp_path, dev=PLAIN, test=rows))
    normalise = Normaliser.load(out / "normalisation.json")
    config = Config(eval=EvalConfig(metrics=("bleu",), bootstrap=0))
    keep_keys(out, LANGS, out)  # A run that was trained on this, as far as it matters here.
    result = evaluate_test(config, out, [normalise(zh, "zh") for _, zh in rows], trained_on=0)
    said = [line for line in score_lines(result) if "not in the form of the training text" in line]
    assert bool(said) == told
    if told:
        best = report["reference_form"]["test"]["zh"]
        assert result["reference_form"] == best
        assert result["scores"]["bleu"]["value"] == pytest.approx(best["bleu"])
        assert "100.0 % of the references are not in the form of the training text (script, marks); a perf" in said[0]
        assert f"BLEU {best['bleu']:.1f}\n  {best['signature']}" in said[0]
