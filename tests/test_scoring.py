"""eval: the numbers are sacreBLEU's, the floor is what a lookup gives, and what can't be compared isn't."""

import json
import os
import random

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from nmt import scoring
from nmt.config import EvalConfig
from nmt.errors import DataError
from nmt.text import read_lines

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
     ("ko", "13a"), ("ja", "char"), ("th", "char")],
)  # fmt: skip
def test_the_tokeniser_follows_the_target_language(tgt, tokenizer):
    assert scoring.tokenize_for(tgt) == tokenizer
    assert f"tok:{tokenizer}|" in scoring.bleu(["a b c d"], [["a b c d"]], tgt).signature


def test_every_metric_agrees_with_sacrebleu_and_ter_splits_chinese_into_characters():
    found = scoring.score(HYPS, rows(REFS), "zh", EvalConfig(metrics=("bleu", "chrf", "ter"), bootstrap=0))
    assert found["chrf"].value == CHRF().corpus_score(HYPS, [REFS]).score
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


def test_the_interval_is_sacrebleus_and_follows_the_seed(monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "77")
    direct = BLEU(tokenize="zh").corpus_score(HYPS, [REFS], n_bootstrap=200)
    settings = EvalConfig(metrics=("bleu",), bootstrap=200, seed=77)
    found = scoring.score(HYPS, rows(REFS), "zh", settings)["bleu"]
    assert (found.mean, found.interval) == (direct._mean, direct._ci)
    assert "bs:200|seed:77|" in found.signature
    other = scoring.score(HYPS, rows(REFS), "zh", EvalConfig(metrics=("bleu",), bootstrap=200, seed=78))["bleu"]
    assert other.mean != found.mean
    assert os.environ["SACREBLEU_SEED"] == "77"


def test_the_seed_leaves_no_trace_in_the_environment(monkeypatch):
    monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    scoring.score(HYPS, rows(REFS), "zh", PLAIN)
    assert "SACREBLEU_SEED" not in os.environ


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
        scoring.evaluate(hyps, srcs, refs, "zh", PLAIN)


# ── the floor and the ceiling ───────────────────────────────────────────────────────────────────────────────────────


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
    assert scoring.floor_translations(train, names, srcs) == slow_floor(train, names, srcs)


def test_a_sentence_of_train_is_looked_up_and_of_equals_the_first():
    train = ["He is here.", "She is there.", "He is here."]
    assert scoring.floor_translations(train, ["一", "二", "三"], ["He is here.", "there", "xyz"]) == ["一", "二", "一"]
    with pytest.raises(DataError, match="no training text"):
        scoring.floor_translations([], [], ["a"])


def test_the_ceiling_scores_the_first_reference_against_the_others():
    refs = [["他走了。", "他离开了。"], ["下雨了。", "正在下雨。", "在下雨。"], ["只有这个。"]] * 12
    first = [row[0] for row in refs if len(row) > 1]
    others = [
        [row[1] for row in refs if len(row) > 1],
        [row[2] if len(row) > 2 else None for row in refs if len(row) > 1],
    ]
    found = scoring.human_ceiling(refs, "zh")
    assert found["lines"] == 24
    assert found["bleu"]["value"] == BLEU(tokenize="zh").corpus_score(first, others).score
    assert scoring.human_ceiling(refs[:20], "zh") is None


# ── what comes out ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_result_has_each_score_beside_its_floor_and_survives_json():
    refs = [[ref] for ref in REFS]
    result = scoring.evaluate(HYPS, SRCS, refs, "zh", EvalConfig(bootstrap=100), train=(SRCS[::-1], REFS[::-1]))
    assert json.loads(json.dumps(result)) == result
    assert result["floor"]["bleu"]["value"] == pytest.approx(100)
    assert result["scores_all_references"] is None
    assert result["ceiling"] is None
    told = "\n".join(scoring.report_lines(result))
    assert f"BLEU: {result['scores']['bleu']['value']:.2f} (" in told
    assert "floor 100.00, -" in told
    for score in result["scores"].values():
        assert score["signature"] in told


def test_further_references_are_scored_beside_the_first_alone():
    refs = [[ref, hyp] for ref, hyp in zip(REFS, HYPS, strict=True)]
    result = scoring.evaluate(HYPS, SRCS, refs, "zh", PLAIN)
    assert result["scores"]["bleu"]["value"] == scoring.bleu(HYPS, rows(REFS), "zh").value
    assert result["scores_all_references"]["bleu"]["value"] == pytest.approx(100)
    assert "nrefs:2|" in "\n".join(scoring.report_lines(result))


def test_the_table_of_lengths_counts_every_line_once_in_the_unit_of_its_script():
    srcs = ["", "one", "a b c d e", "a b c d e f", " ".join("x" * 41)]
    hyps, refs = ["那天很冷。"] * 5, [["那天很冷。"]] * 5
    table = scoring.by_length(hyps, srcs, refs, "zh")
    assert table["unit"] == "words"
    assert [(row["from"], row["to"], row["lines"]) for row in table["rows"]] == [(1, 5, 3), (6, 10, 1), (41, None, 1)]
    table = scoring.by_length(["a"] * 2, ["你好。", "我们 明天 再 去。"], [["a"]] * 2, "en")
    assert table["unit"] == "characters"
    assert [(row["from"], row["lines"]) for row in table["rows"]] == [(1, 1), (6, 1)]
    assert scoring.by_length(["a"], ["안녕하세요 여러분"], [["a"]], "en")["unit"] == "words"


@pytest.mark.parametrize(
    ("text", "repeated"),
    [("我们我们我们我们我们", True), ("the cat the cat the cat the cat ", True), ("哈哈哈哈", False), ("哈" * 9, True),
     ("等一下…………………………", False), ("我们走吧，我们走吧。", False), ("", False), ("100000000", True),
     ("- - - - - - - -", False)],
)  # fmt: skip
def test_an_output_that_goes_round_in_circles_is_seen(text, repeated):
    assert scoring.is_repeated(text) is repeated


def test_empty_repeated_and_cut_outputs_are_counted_unless_their_source_is_so():
    srcs = ["Stop.", "", "No no no no no no.", "He said: “Go!”", "A title", "Go on.", "Well?"]
    hyps = ["  ", "", "不不不不不不不不不。", "他说：“走！”", "标题", "走走走走走走走走走。", "那么我们"]
    assert scoring.suspicious(hyps, srcs) == {"empty": 1, "repeated": 1, "cut": 1}


# ── comparing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_scores_on_other_ground_are_not_compared():
    def result(srcs=SRCS, refs=REFS, tgt="zh", bootstrap=0):
        return scoring.evaluate(HYPS, srcs, rows(refs), tgt, EvalConfig(metrics=("bleu",), bootstrap=bootstrap))

    scoring.check_comparable(result(), result(bootstrap=50))
    for other, named in [
        (result(srcs=SRCS[::-1]), "their sources differ"),
        (result(refs=REFS[::-1]), "their references differ"),
        (result(tgt="ja"), r"their signatures \(.*tok:zh.*tok:char.*\) differ"),
    ]:
        with pytest.raises(DataError, match=named):
            scoring.check_comparable(result(), other)


def test_a_paired_test_tells_a_real_difference_from_none():
    choose = random.Random(3)
    words = ["我们", "明天", "去", "北京", "买", "书", "看", "电影", "他", "喜欢"]
    refs = ["".join(choose.choices(words, k=8)) + "。" for _ in range(80)]
    worse = [ref if choose.random() < 0.5 else ref[:3] + ref[::-1] for ref in refs]
    like = [worse[i] if i % 40 else refs[i] for i in range(80)]
    settings = EvalConfig(metrics=("bleu", "chrf"), bootstrap=300)
    found = scoring.compare({"one": worse, "two": refs, "three": like}, rows(refs), "zh", settings)
    table = found["scores"]["BLEU"]["systems"]
    assert found["baseline"] == "one"
    assert table["one"]["p"] is None
    assert table["two"]["p"] < 0.05 < table["three"]["p"]
    assert table["one"]["value"] == scoring.bleu(worse, rows(refs), "zh").value
    assert "tok:zh" in found["scores"]["BLEU"]["signature"]
    told = "\n".join(scoring.comparison_lines(found))
    assert "baseline" in told
    assert "chrF2" in told
    with pytest.raises(DataError, match="3 hypotheses of b, 80 references"):
        scoring.compare({"a": worse, "b": worse[:3]}, rows(refs), "zh", settings)


# ── on the real corpus ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "src", "tgt", "low", "high"),
    [("dev", "en", "zhs", 18, 19), ("test", "en", "zhs", 17, 18), ("dev", "zhs", "en", 13.5, 14.5)],
)
def test_the_floor_of_the_real_corpus_is_where_it_was_measured(foreign_data, split, src, tgt, low, high):
    folder = foreign_data / "cmn" / "split"
    train = read_lines(folder / f"train.{src}"), read_lines(folder / f"train.{tgt}")
    hyps = scoring.floor_translations(*train, read_lines(folder / f"{split}.{src}"))
    assert low < scoring.bleu(hyps, rows(read_lines(folder / f"{split}.{tgt}")), tgt[:2]).value < high


@pytest.mark.slow
def test_a_perfect_output_in_mixed_script_scores_what_was_measured(foreign_data):
    folder = foreign_data / "cmn" / "split"
    mixed, simplified = read_lines(folder / "test.zh"), read_lines(folder / "test.zhs")
    assert scoring.bleu(simplified, rows(mixed), "zh").value == pytest.approx(72.4, abs=0.05)
