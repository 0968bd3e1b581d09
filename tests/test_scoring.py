"""eval: the numbers are sacreBLEU's, the baseline is what a lookup gives, and what can't be compared isn't."""

import json
import logging
import math
import random

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from nmt.config import EvalConfig
from nmt.errors import ConfigError, DataError
from nmt.evaluation import baselines, report
from nmt.evaluation import metrics as scoring
from nmt.io import read_lines

PLAIN = EvalConfig(bootstrap=0)
SIGNATURE = f"nrefs:1|case:mixed|eff:no|tok:zh|smooth:exp|version:{sacrebleu.__version__}"

SRCS = [
    "He sold the old piano.",
    "Where do you keep the salt?",
    "Nobody answered, so we left!",
    "It rained for a week.",
]
REFS = ["他把旧钢琴卖了。", "你把盐放在哪里？", "没有人回答，所以我们走了！", "下了一个星期的雨。"]
HYPS = ["他卖了旧钢琴。", "你把盐放在哪？", "没人回答，所以我们走了！", "雨下了一周。"]


def rows(*columns: list[str]) -> list[list[str]]:
    return [list(row) for row in zip(*columns, strict=True)]


# ── scores ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bleu_is_what_sacrebleu_says_with_its_signature():
    found = scoring.bleu(HYPS, rows(REFS), "zh")
    assert found.value == BLEU(tokenize="zh").corpus_score(HYPS, [REFS]).score
    assert found.signature == SIGNATURE
    assert scoring.bleu(REFS, rows(REFS), "zh").value == pytest.approx(100)


def test_bleu_of_one_line_is_the_formula_worked_by_hand():
    # Eight tokens each, one comma half-width: 7 of 8 unigrams match, 5 of 7 bigrams, 3 of 6 trigrams, 2 of 5 fours.
    (ref,), (hyp,) = ["没有，我们走！好"], ["没有,我们走！好"]
    by_hand = 100 * (7 / 8 * 5 / 7 * 3 / 6 * 2 / 5) ** 0.25
    assert scoring.bleu([hyp], [[ref]], "zh").value == pytest.approx(by_hand)


def test_a_tokeniser_without_chinese_takes_a_sentence_for_a_word():
    assert BLEU(tokenize="13a").corpus_score(HYPS, [REFS]).score < 10 < scoring.bleu(HYPS, rows(REFS), "zh").value


@pytest.mark.parametrize(
    ("tgt", "tokenizer"),
    [("zh", "zh"), ("zh-TW", "zh"), ("zh_Hans", "zh"), ("yue", "zh"), ("cmn", "zh"), ("en", "13a"), ("de", "13a"),
     ("ko", "char"), ("ja", "char"), ("th", "char"), ("zho", "zh"), ("zh-yue", "zh"), ("zh-Latn-pinyin", "13a"),
     ("jpn_Jpan", "char"), ("sr-Cyrl", "13a")],
)  # fmt: skip
def test_the_tokeniser_follows_the_target_language(tgt, tokenizer):
    assert scoring.tokenize_for(tgt) == tokenizer
    assert f"tok:{tokenizer}|" in scoring.bleu(["a b c d"], [["a b c d"]], tgt).signature


def test_every_metric_agrees_with_sacrebleu_and_ter_splits_chinese_into_characters():
    found = scoring.score(HYPS, rows(REFS), "zh", EvalConfig(metrics=("bleu", "chrf", "ter"), bootstrap=0))
    assert found["chrf"].value == CHRF().corpus_score(HYPS, [REFS]).score
    assert found["chrf"].signature == str(signed(CHRF(), HYPS, REFS))
    split = TER(normalized=True, asian_support=True)
    assert found["ter"].value == split.corpus_score(HYPS, [REFS]).score < TER().corpus_score(HYPS, [REFS]).score
    assert "asian:yes" in found["ter"].signature
    assert "asian:no" in scoring.score(["a"], [["a"]], "en", EvalConfig(metrics=("bleu", "ter")))["ter"].signature


def test_lines_may_have_different_numbers_of_references():
    refs = [["你把盐放在哪里？", "盐放在哪？", "盐在哪里？"], ["他走了。"], ["下雨了。", "正在下雨。"]]
    hyps = ["盐放在哪里？", "他离开了。", "正下着雨。"]
    columns = [
        ["你把盐放在哪里？", "他走了。", "下雨了。"],
        ["盐放在哪？", None, "正在下雨。"],
        ["盐在哪里？", None, None],
    ]
    found = scoring.bleu(hyps, refs, "zh")
    assert found.value == BLEU(tokenize="zh").corpus_score(hyps, columns).score
    assert found.signature.startswith("nrefs:var|")


def test_an_empty_reference_is_a_reference():
    found = scoring.bleu(["", "他走了。"], [[""], ["他走了。"]], "zh")
    assert found.value == pytest.approx(100)
    assert found.signature == SIGNATURE


METRICS = {
    "bleu": lambda: BLEU(tokenize="zh"),
    "chrf": CHRF,
    "ter": lambda: TER(normalized=True, asian_support=True),
}
ALL = tuple(METRICS)


def signed(metric, hyps, refs):
    metric.corpus_score(hyps, [refs])
    return metric.get_signature()


def systems(lines: int, seed: int = 3) -> tuple[list[str], list[str], list[str]]:
    """References, and two systems of which the second is somewhat better."""
    choose = random.Random(seed)
    words = ["我们", "明天", "去", "北京", "买", "书", "看", "电影", "他", "喜欢"]
    refs = ["".join(choose.choices(words, k=choose.randint(3, 9))) + "。" for _ in range(lines)]
    one = [ref if choose.random() < 0.4 else ref[:3] + ref[:2:-1] for ref in refs]
    two = [ref if choose.random() < 0.6 else ref[:4] + ref[:3:-1] for ref in refs]
    return refs, one, two


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("seed", [1, 77])
def test_the_interval_is_sacrebleus_and_follows_the_seed(name, seed, monkeypatch):
    refs, hyps, _ = systems(60)
    monkeypatch.setenv("SACREBLEU_SEED", str(seed))
    metric = METRICS[name]()
    direct = metric.corpus_score(hyps, [refs], n_bootstrap=200)
    settings = EvalConfig(metrics=("bleu", name) if name != "bleu" else ("bleu",), bootstrap=200, seed=seed)
    found = scoring.score(hyps, rows(refs), "zh", settings)[name]
    assert found.value == direct.score
    assert found.signature == str(metric.get_signature())
    # sacreBLEU resamples in float32.
    assert found.mean == pytest.approx(direct._mean, rel=1e-6)
    assert found.interval == pytest.approx(direct._ci, rel=1e-5)
    other = scoring.score(hyps, rows(refs), "zh", EvalConfig(metrics=("bleu",), bootstrap=200, seed=seed + 1))
    assert other["bleu"].mean != found.mean


def test_the_interval_of_several_references_is_sacrebleus(monkeypatch):
    refs, one, two = systems(50)
    columns = [refs, [two[i] if i % 3 else None for i in range(50)]]
    monkeypatch.setenv("SACREBLEU_SEED", "5")
    settings = EvalConfig(metrics=ALL, bootstrap=100, seed=5)
    found = scoring.score(one, [[ref for ref in row if ref] for row in zip(*columns, strict=True)], "zh", settings)
    for name, metric in METRICS.items():
        direct = metric().corpus_score(one, columns, n_bootstrap=100)
        assert found[name].value == pytest.approx(direct.score, rel=1e-12)
        assert found[name].mean == pytest.approx(direct._mean, rel=1e-6)
        assert found[name].interval == pytest.approx(direct._ci, rel=1e-5)


WEAK = {
    "one line right and two that share nothing": (["你好。", "啊啊啊啊", "哦哦哦哦"], ["你好。", "再见", "谢谢"]),
    "every output empty": ([""] * 4, REFS),
    "every output blank": ([" \t"] * 4, REFS),
    "every reference empty": (HYPS, [""] * 4),
    "all empty": ([""] * 4, [""] * 4),
    "nothing right": (["啊"] * 4, REFS),
    "everything right": (REFS, REFS),
    "the same line each time": ([HYPS[0]] * 4, [REFS[0]] * 4),
    "one character a line": (["好", "不", "", "是"], ["好", "好", "好", "好"]),
    "some outputs empty": (["", HYPS[1], "", ""], REFS),
    "endless": (["哦" * 500] * 2, REFS[:2]),
    "no letters": (["。", "…", "1"], ["。", "！", "2"]),
    "lone surrogates and marks": (["\ud800", "\u0301", "\ufeff"], ["\ud800", "e\u0301", ""]),
}


@pytest.mark.parametrize(("hyps", "refs"), WEAK.values(), ids=WEAK)
def test_a_weak_system_has_every_score_and_interval_and_is_compared(hyps, refs):
    settings = EvalConfig(metrics=ALL, bootstrap=100)
    found = scoring.score(hyps, rows(refs), "zh", settings)
    for name, metric in METRICS.items():
        assert found[name].value == metric().corpus_score(hyps, [refs]).score
        assert found[name].interval >= 0
        assert found[name].no_interval is None
    compared = scoring.compare({"one": hyps, "two": hyps[::-1], "three": refs}, rows(refs), "zh", settings)
    for table in compared["scores"].values():
        for name, row in table["systems"].items():
            assert row["p"] is None if name == "one" else 0 < row["p"] <= 1
    json.dumps(compared, allow_nan=False)
    assert "p = " in "\n".join(report.comparison_lines(compared))


def test_an_interval_that_can_not_be_is_missing_with_its_reason_and_the_score_stays():
    settings = EvalConfig(metrics=ALL, bootstrap=1000)
    alone = scoring.score(["他走了。"], [["他离开了。"]], "zh", settings)
    few = scoring.score(HYPS, rows(REFS), "zh", EvalConfig(metrics=ALL, bootstrap=39))
    off = scoring.score(HYPS, rows(REFS), "zh", EvalConfig(metrics=ALL, bootstrap=0))
    for name in ALL:
        assert alone[name].value > 0
        assert alone[name].interval is None
        assert "one line" in alone[name].no_interval
        assert few[name].interval is None
        assert "at least 40" in few[name].no_interval
        assert "bs:" not in few[name].signature
        assert off[name].interval is off[name].no_interval is None
    assert " (" not in report.report_lines(report.evaluate(HYPS, SRCS, rows(REFS), "zh", PLAIN))[0]
    assert report.report_lines(report.evaluate(HYPS, SRCS, rows(REFS), "zh", PLAIN))[0][-1].isdigit()
    result = report.evaluate(["他走了。"], ["He left."], [["他离开了。"]], "zh", settings)
    assert "(no interval: one line alone says nothing of others)" in "\n".join(report.report_lines(result))


def test_some_resamplings_without_a_score_leave_no_interval(monkeypatch):
    monkeypatch.setattr(scoring, "bootstrap", lambda *_: np.array([1.0, math.nan, 2.0, math.nan]))
    found = scoring.score(HYPS, rows(REFS), "zh", EvalConfig(metrics=("bleu",), bootstrap=100))["bleu"]
    assert (found.mean, found.interval, found.no_interval) == (None, None, "2 resamplings have no score")


def test_an_edit_rate_over_references_of_different_lengths_is_sacrebleus():
    # Their mean length is no whole number.
    refs = [["he left", "he went away"], ["it rains", "rain is falling today"]]
    found = scoring.score(["he left now", "it rains"], refs, "en", EvalConfig(metrics=ALL, bootstrap=0))["ter"]
    assert found.value == TER().corpus_score(["he left now", "it rains"], [list(column) for column in zip(*refs)]).score  # noqa: B905


def test_a_score_of_scores_json_from_before_intervals_had_a_reason_is_printed():
    result = report.evaluate(HYPS, SRCS, rows(REFS), "zh", PLAIN)
    for found in result["scores"].values():
        del found["no_interval"]
    assert report.report_lines(result)[0].startswith("BLEU: ")


# ── the tokeniser and the text ──────────────────────────────────────────────────────────────────────────────────────

KANA = ["わたしたちは北京に行きます。", "これはペンです。"]
THAI = ["สวัสดีครับ", "ผมไปตลาด"]
KOREAN = ["나는 학교에 갑니다.", "오늘은 날씨가 좋아요."]
ENGLISH = ["What does 中文 mean?", "It means the Chinese language."]


@pytest.mark.parametrize("tgt", ["cn", "chs", "CHT", "Chinese", "jp", "zh-CHS"])
def test_a_name_that_is_no_code_is_refused_before_it_chooses_a_tokeniser(tgt):
    with pytest.raises(ConfigError, match=r"did you mean (zh|ja)"):
        scoring.bleu(REFS, rows(REFS), tgt)
    with pytest.raises(ConfigError, match=r"did you mean (zh|ja)"):
        scoring.compare({"a": REFS, "b": HYPS}, rows(REFS), tgt, PLAIN)


@pytest.mark.parametrize(
    ("texts", "tgt", "fix"),
    [
        (REFS, "en", "Han characters, which BLEU for en (tokeniser 13a) takes for one word; .*e.g. zh."),
        (REFS, "ch", "e.g. zh"),  # Chamorro.
        (REFS, "zh-Latn", "e.g. zh"),
        (["他有iPhone。"], "de", "e.g. zh"),
        (KANA, "en", "e.g. ja"),
        (KANA, "zh", "e.g. ja"),
        (["中" * 89 + "の" * 11], "en", "e.g. ja"),  # Over a tenth of it.
        (["中" * 90 + "の" * 10], "en", "e.g. zh"),
        (["カタカナ"], "zh", "e.g. ja"),
        (THAI, "zh", "Thai characters.*e.g. th"),
        (["ສະບາຍດີ"], "en", "e.g. lo"),
        (["សួស្តី"], "fr", "e.g. km"),
        (["မင်္ဂလာပါ"], "en", r"e.g. my\.$"),
        (["བཀྲ་ཤིས་བདེ་ལེགས།"], "en", "e.g. bo"),
        (ENGLISH, "ja", "Latin characters, which BLEU for ja .tokeniser char. would split into letters; give"),
        (["Привет, как дела?"], "th", "Cyrillic characters"),
        (ENGLISH, "ko", "Latin characters"),
    ],
)  # fmt: skip
def test_text_in_a_script_that_the_tokeniser_is_not_for_is_refused_with_the_fix(texts, tgt, fix):
    pattern = fix.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(DataError, match=pattern):
        scoring.score(texts, rows(texts), tgt, PLAIN)
    with pytest.raises(DataError, match=pattern):
        report.evaluate(texts, texts, rows(texts), tgt, PLAIN)
    with pytest.raises(DataError, match=pattern):
        scoring.compare({"a": texts, "b": texts[::-1]}, rows(texts), tgt, PLAIN)


@pytest.mark.parametrize(
    ("texts", "tgt"),
    [(REFS, "zh"), (REFS, "yue"), (REFS, "lzh"), (KANA, "ja"), (REFS, "ja"), (THAI, "th"), (KOREAN, "ko"),
     (["大韓民國"], "ko"), (ENGLISH, "en"), (ENGLISH, "zh"), (["Привет!"], "ru"), (["123", "?!"], "en"),
     (["123", "?!"], "ja"), ([""], "zh"), (["नमस्ते"], "hi"), (["مرحبا"], "ar"), (["NBA和CBA", "GDP"], "zh")],
)  # fmt: skip
def test_text_that_fits_its_language_is_scored(texts, tgt):
    assert scoring.score(texts, rows(texts), tgt, PLAIN)["chrf"].value == (100 if any(texts) else 0)


def test_scores_of_japanese_and_korean_say_that_their_tokeniser_is_not_sacrebleus(caplog):
    caplog.set_level(logging.INFO)
    for tgt, texts in (("ja", KANA), ("ko", KOREAN)):
        caplog.clear()
        assert "tok:char" in scoring.score(texts, rows(texts), tgt, PLAIN)["bleu"].signature
        (record,) = caplog.records
        assert record.getMessage().endswith(f"it can't be compared with scores by sacreBLEU's {tgt}-mecab")
        assert f"{tgt}-mecab" in BLEU.TOKENIZERS


def test_nothing_is_said_of_a_tokeniser_where_sacrebleus_own_is_used(caplog, monkeypatch):
    monkeypatch.setattr(scoring, "tokenize_for", lambda tgt: "none")
    monkeypatch.setattr(scoring, "check_tokenizer", lambda *_: None)
    scoring.score(KANA, rows(KANA), "ja", PLAIN)
    assert caplog.records == []


@pytest.mark.parametrize("tgt", ["th", "lo", "km", "my", "bo"])
def test_ter_is_refused_where_it_would_take_a_line_for_a_word(tgt):
    with pytest.raises(ConfigError, match=r"TER knows no words of \w+; leave ter out of eval.metrics"):
        scoring.score([""], [[""]], tgt, EvalConfig(metrics=ALL, bootstrap=0))


def test_tokenised_text_is_named_in_our_own_words(caplog):
    hyps, refs = ["It is late ."] * 5 + ["It is late."] * 5, ["It is late."] * 10
    scoring.score(hyps, rows(refs), "en", PLAIN)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "eval: 5 of the 10 hypotheses end in a full stop with a space before it, as tokenised text does"
    ]
    caplog.clear()
    scoring.score(["It is late ."] + ["It is late."] * 9, rows(refs), "en", PLAIN)
    assert caplog.records == [], "a tenth may be an accident"
    scoring.score(["It is late ."] * 200, rows(["It is late ."] * 200), "en", PLAIN)
    assert [record.name for record in caplog.records] == ["nmt.evaluation.metrics"] * 2
    assert "of the 200 references" in caplog.text


@pytest.mark.parametrize("call", [
    lambda: scoring.bleu("他走了。", [["他"], ["走"], ["了"], ["。"]], "zh"),
    lambda: scoring.bleu(REFS, REFS, "zh"),
    lambda: scoring.score(REFS, REFS, "zh", PLAIN),
    lambda: report.evaluate(HYPS, "abcd", rows(REFS), "zh", PLAIN),
    lambda: scoring.compare({"a": "他走了。"}, rows(REFS), "zh", PLAIN),
])  # fmt: skip
def test_a_text_in_place_of_a_list_is_a_mistake_of_the_caller_and_no_list_of_characters(call):
    with pytest.raises(TypeError, match="lists of lines"):
        call()


@pytest.mark.parametrize(
    ("hyps", "srcs", "refs", "message"),
    [
        (HYPS[:3], SRCS, rows(REFS), "3 hypotheses, 4 sources, 4 references"),
        (HYPS, SRCS, rows(REFS[:2]), "4 hypotheses, 4 sources, 2 references"),
        ([], [], [], "nothing to score"),
        (HYPS, SRCS, [["一"], [], ["二"], ["三"]], "line 2 has no reference"),
    ],
)
def test_texts_that_do_not_match_are_refused_with_their_counts(hyps, srcs, refs, message):
    with pytest.raises(DataError, match=message):
        report.evaluate(hyps, srcs, refs, "zh", PLAIN)


# ── the baseline and the human score ────────────────────────────────────────────────────────────────────────────────


def slow_floor(train_src: list[str], train_tgt: list[str], srcs: list[str]) -> list[str]:
    def grams(text: str) -> set[str]:
        return {text} if len(text) < 3 else {a + b + c for a, b, c in zip(text, text[1:], text[2:], strict=False)}

    def likeness(one: str, other: str) -> float:
        return len(grams(one) & grams(other)) / len(grams(one) | grams(other))

    found = []
    for src in srcs:
        # max takes the first of equals.
        found.append(max(zip(train_src, train_tgt, strict=True), key=lambda pair: likeness(pair[0], src))[1])
    return found


short_texts = st.lists(st.text("ab 好", max_size=9), min_size=1, max_size=12)


@given(train=short_texts, srcs=short_texts)
def test_the_floor_is_what_comparing_with_every_pair_finds(train, srcs):
    names = [str(place) for place in range(len(train))]
    assert baselines.baseline_translations(train, names, srcs) == slow_floor(train, names, srcs)


def test_a_sentence_of_train_is_looked_up_and_of_equals_the_first():
    train = ["He is here.", "She is there.", "He is here."]
    assert baselines.baseline_translations(train, ["一", "二", "三"], ["He is here.", "there", "xyz"]) == [
        "一",
        "二",
        "一",
    ]
    with pytest.raises(DataError, match="no training text"):
        baselines.baseline_translations([], [], ["a"])


def test_the_ceiling_scores_the_first_reference_against_the_others():
    refs = [["他走了。", "他离开了。"], ["下雨了。", "正在下雨。", "在下雨。"], ["只有这个。"]] * 12
    first = [row[0] for row in refs if len(row) > 1]
    others = [
        [row[1] for row in refs if len(row) > 1],
        [row[2] if len(row) > 2 else None for row in refs if len(row) > 1],
    ]
    found = baselines.human_score(refs, "zh")
    assert found["lines"] == 24
    assert found["bleu"]["value"] == BLEU(tokenize="zh").corpus_score(first, others).score
    assert baselines.human_score(refs[:29], "zh")["lines"] == 20
    assert baselines.human_score(refs[:28], "zh") is None, "19 lines are too few"


# ── what comes out ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_result_has_each_score_beside_its_floor_and_survives_json():
    refs = [[ref] for ref in REFS]
    result = report.evaluate(HYPS, SRCS, refs, "zh", EvalConfig(bootstrap=100), train=(SRCS[::-1], REFS[::-1]))
    assert json.loads(json.dumps(result)) == result
    assert result["baseline"]["bleu"]["value"] == pytest.approx(100)
    assert result["scores_all_references"] is None
    assert result["human"] is None
    told = "\n".join(report.report_lines(result))
    assert f"BLEU: {result['scores']['bleu']['value']:.2f} (" in told
    assert "baseline 100.00, -" in told
    for score in result["scores"].values():
        assert score["signature"] in told


def test_further_references_are_scored_beside_the_first_alone():
    refs = [[ref, hyp] for ref, hyp in zip(REFS, HYPS, strict=True)]
    result = report.evaluate(HYPS, SRCS, refs, "zh", PLAIN)
    assert result["scores"]["bleu"]["value"] == scoring.bleu(HYPS, rows(REFS), "zh").value
    assert result["scores_all_references"]["bleu"]["value"] == pytest.approx(100)
    lines = report.report_lines(result)
    assert "nrefs:2|" in "\n".join(lines)
    assert f"BLEU, all references: {result['scores_all_references']['bleu']['value']:.2f}" in lines


def test_the_table_of_lengths_counts_every_line_once_in_the_unit_of_its_script():
    srcs = ["", "one", "a b c d e", "a b c d e f", " ".join("x" * 41)]
    hyps, refs = ["那天很冷。"] * 5, [["那天很冷。"]] * 5
    table = report.by_length(hyps, srcs, refs, "zh")
    assert table["unit"] == "words"
    assert [(row["from"], row["to"], row["lines"]) for row in table["rows"]] == [(1, 5, 3), (6, 10, 1), (41, None, 1)]
    each = report.by_length(["a"] * 50, [" ".join("x" * n) for n in range(1, 51)], [["a"]] * 50, "en")["rows"]
    assert [(row["from"], row["to"]) for row in each] == [(1, 5), (6, 10), (11, 20), (21, 40), (41, None)]
    assert [row["lines"] for row in each] == [5, 5, 10, 20, 10]
    table = report.by_length(["a"] * 2, ["你好。", "我们 明天 再 去。"], [["a"]] * 2, "en")
    assert table["unit"] == "characters"
    assert [(row["from"], row["lines"]) for row in table["rows"]] == [(1, 1), (6, 1)]
    assert report.by_length(["a"], ["안녕하세요 여러분"], [["a"]], "en")["unit"] == "words"


# ── comparing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_scores_on_other_ground_are_not_compared():
    def result(srcs=SRCS, refs=REFS, tgt="zh", bootstrap=0):
        return report.evaluate(HYPS, srcs, rows(refs), tgt, EvalConfig(metrics=("bleu",), bootstrap=bootstrap))

    scoring.check_comparable(result(), result(bootstrap=50))
    bare = result()["scores"]["bleu"]["signature"]
    assert scoring._without_resampling(result(bootstrap=50)["scores"]["bleu"]["signature"]) == bare
    for other, named in [
        (result(srcs=SRCS[::-1]), "their sources differ"),
        (result(refs=REFS[::-1]), "their references differ"),
        (result(tgt="ja"), r"their signatures \(.*tok:zh.*tok:char.*\) differ"),
    ]:
        with pytest.raises(DataError, match=named):
            scoring.check_comparable(result(), other)


def test_a_paired_test_tells_a_real_difference_from_none():
    refs, worse, better = systems(80)
    like = [worse[i] if i % 40 else refs[i] for i in range(80)]
    settings = EvalConfig(metrics=("bleu", "chrf"), bootstrap=300)
    found = scoring.compare({"one": worse, "two": refs, "three": like, "four": better}, rows(refs), "zh", settings)
    table = found["scores"]["BLEU"]["systems"]
    assert found["baseline"] == "one"
    assert table["one"]["p"] is None
    assert table["two"]["p"] < 0.05 < table["three"]["p"]
    assert table["one"]["value"] == scoring.bleu(worse, rows(refs), "zh").value
    assert "|ar:300|" in found["scores"]["BLEU"]["signature"]
    assert "tok:zh" in found["scores"]["BLEU"]["signature"]
    told = "\n".join(report.comparison_lines(found))
    assert "baseline" in told
    assert "chrF2" in told
    with pytest.raises(DataError, match="3 hypotheses of b, 80 references"):
        scoring.compare({"a": worse, "b": worse[:3]}, rows(refs), "zh", settings)


def test_systems_that_do_not_differ_have_p_1_in_every_metric():
    refs, one, _ = systems(30)
    settings = EvalConfig(metrics=ALL, bootstrap=200)
    for texts, against in [(one, refs), (refs, refs), ([""] * 30, refs), (one[:1], refs[:1])]:
        compared = scoring.compare({"a": texts, "b": list(texts), "c": list(texts)}, rows(against), "zh", settings)
        for table in compared["scores"].values():
            assert [row["p"] for row in table["systems"].values()] == [None, 1.0, 1.0]


def test_outputs_that_differ_but_score_the_same_have_p_1():
    refs = ["他走了。", "他走了。", "天气很好。", "天气很好。"]
    one, two = ["他走了。", "啊", "天气很好。", "啊"], ["啊", "他走了。", "啊", "天气很好。"]
    compared = scoring.compare({"a": one, "b": two}, rows(refs), "zh", EvalConfig(metrics=ALL, bootstrap=500))
    assert [table["systems"]["b"]["p"] for table in compared["scores"].values()] == [1.0, 1.0, 1.0]


def test_one_sentence_that_differs_is_no_evidence_whatever_the_score_makes_of_it():
    hyps, refs = WEAK["one line right and two that share nothing"]
    settings = EvalConfig(metrics=ALL, bootstrap=1000)
    compared = scoring.compare({"a": hyps, "b": ["啊啊啊啊", *hyps[1:]]}, rows(refs), "zh", settings)
    assert [table["systems"]["b"]["p"] for table in compared["scores"].values()] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", METRICS)
def test_p_is_what_exchanging_the_texts_of_every_set_of_sentences_gives(name):
    refs, one, two = systems(7, seed=4)
    metric = METRICS[name]()

    def difference(exchanged: int) -> float:
        pairs = [(b, a) if exchanged >> i & 1 else (a, b) for i, (a, b) in enumerate(zip(one, two, strict=True))]
        a, b = (metric.corpus_score([pair[side] for pair in pairs], [refs]).score for side in (0, 1))
        return abs(a - b)

    least = difference(0) - 1e-9
    exact = sum(difference(exchanged) >= least for exchanged in range(2**7)) / 2**7
    settings = EvalConfig(metrics=ALL, bootstrap=4000)
    table = scoring.compare({"a": one, "b": two}, rows(refs), "zh", settings)["scores"][
        metric.corpus_score(one, [refs]).name
    ]
    assert 0 < exact < 1
    assert table["systems"]["b"]["p"] == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 4000) ** 0.5)


@pytest.mark.parametrize("seed", [2, 12345])
def test_p_is_that_of_sacrebleus_randomisation_but_for_its_ties(seed, monkeypatch):
    refs, one, two = systems(70, seed=6)
    monkeypatch.setenv("SACREBLEU_SEED", str(seed))
    metrics = {name: make() for name, make in METRICS.items()}
    _, theirs = PairedTest([("a", one), ("b", two)], metrics, [refs], test_type="ar", n_samples=500)()
    ours = scoring.compare({"a": one, "b": two}, rows(refs), "zh", EvalConfig(metrics=ALL, bootstrap=500, seed=seed))
    for name, table in ours["scores"].items():
        # A difference exactly as large counts as large here.
        assert theirs[name][1].p_value <= table["systems"]["b"]["p"] <= theirs[name][1].p_value + 0.01


def test_off_is_off_for_a_comparison_too(monkeypatch):
    for name in ("bootstrap", "p_value"):
        monkeypatch.setattr(scoring, name, lambda *_: pytest.fail("it was resampled"))
    compared = scoring.compare({"a": HYPS, "b": REFS}, rows(REFS), "zh", EvalConfig(metrics=ALL, bootstrap=0))
    for table in compared["scores"].values():
        assert not {"ar", "bs", "seed"} & {part.split(":")[0] for part in table["signature"].split("|")}
        for row in table["systems"].values():
            assert row["mean"] is row["interval"] is row["p"] is None
    told = "\n".join(report.comparison_lines(compared))
    assert sum(line.endswith("  not tested (eval.bootstrap is 0)") for line in told.split("\n")) == 3
    assert "±" not in told


# ── which way is better ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_floor_says_which_way_its_metric_is_better():
    assert report.baseline_text("bleu", 20, 5) == "baseline 5.00, +15.00"
    assert report.baseline_text("chrf", 20, 25.5) == "baseline 25.50, -5.50"
    assert report.baseline_text("ter", 85.55, 65.52) == "baseline 65.52, 20.03 worse (lower is better)"
    assert report.baseline_text("ter", 60, 65.5) == "baseline 65.50, 5.50 better (lower is better)"
    settings = EvalConfig(metrics=ALL, bootstrap=0)
    told = report.report_lines(report.evaluate(HYPS, SRCS, rows(REFS), "zh", settings, train=(SRCS, REFS)))
    (ter,) = [line for line in told if line.startswith("TER")]
    assert ter.endswith("worse (lower is better)")
    compared = report.comparison_lines(scoring.compare({"a": HYPS, "b": REFS}, rows(REFS), "zh", settings))
    assert [line for line in compared if line.startswith("TER (lower is better)  nrefs:1|")]


# ── on the real corpus ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "src", "tgt", "low", "high"),
    [("dev", "en", "zhs", 18, 19), ("test", "en", "zhs", 17, 18), ("dev", "zhs", "en", 13.5, 14.5)],
)
def test_the_floor_of_the_real_corpus_is_where_it_was_measured(foreign_data, split, src, tgt, low, high):
    folder = foreign_data / "cmn" / "split"
    train = read_lines(folder / f"train.{src}"), read_lines(folder / f"train.{tgt}")
    hyps = baselines.baseline_translations(*train, read_lines(folder / f"{split}.{src}"))
    assert low < scoring.bleu(hyps, rows(read_lines(folder / f"{split}.{tgt}")), tgt[:2]).value < high


@pytest.mark.slow
def test_a_perfect_output_in_mixed_script_scores_what_was_measured(foreign_data):
    folder = foreign_data / "cmn" / "split"
    mixed, simplified = read_lines(folder / "test.zh"), read_lines(folder / "test.zhs")
    assert scoring.bleu(simplified, rows(mixed), "zh").value == pytest.approx(72.4, abs=0.05)
