"""The bundled corpus: made by its script, in cmn's layout, learnable, and not to be had by looking up."""

import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import sacrebleu

from nmt.config import CleanConfig
from nmt.corpus.cleaning import clean_corpus
from nmt.corpus.reading import find_sources
from nmt.corpus.script import simplify
from nmt.io import read_lines

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "make_mini_corpus.py"
CORPUS = ROOT / "data" / "mini" / "raw" / "mini.txt"

GOLDEN = """
There are ten green radios next to the bookshelf in the office.|办公室里的书架旁边有十台绿色收音机。
You bought ten cheap shirts for forty-two yuan last Thursday evening.|你上星期四晚上花四十二元买了十件便宜的衬衫。
He gave John six hundred and fifty-nine watches last Wednesday afternoon.|他上星期三下午送给了约翰六百五十九块手表。
Was that special notebook found by her teacher two months ago?|那本特别的笔记本两个月前被她的老师找到了吗？
We will not go to the church at ten to five tomorrow afternoon.|我们明天下午差十分五点不会去教堂。
Mr. Wang's flower is much more expensive than this precious photo.|王先生的花比这张珍贵的照片贵得多。
That apple is not as heavy as this chair.|那个苹果没有这把椅子那么重。
Miss Zhang is eighteen years younger than Mr. Wang's grandfather.|张小姐比王先生的爷爷小十八岁。
The three cameras that your student found at the hotel are really good.|你的学生在饭店找到的那三台照相机真的很好。
Our birthday is on February the first.|我们的生日是二月一号。
Who never dances at the post office in winter?|谁冬天从来不在邮局跳舞？
"""
"""Rows of the grammar that a reader of both languages has checked."""

ENGLISH_DIGITS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen"""
ENGLISH_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    return [line.split("\t") for line in CORPUS.read_bytes().decode(errors="replace").split("\n")[:-1]]


def part(rows: list[list[str]], name: str) -> list[tuple[str, str]]:
    """English and Chinese of the rows with this attribution; the third column is the last."""
    return [(row[0], row[1]) for row in rows if row[2:] == [f"nmt mini corpus: {name}"]]


def key(text: str) -> str:
    return "".join(letter for letter in simplify(text).casefold() if letter.isalnum())


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_the_script_writes_the_file_in_the_repository_whatever_the_hash_seed(tmp_path: Path, hash_seed: str) -> None:
    made = tmp_path / "mini.txt"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "LC_ALL": "C"}
    subprocess.run([sys.executable, SCRIPT, made], check=True, env=environment)
    assert made.read_bytes() == CORPUS.read_bytes()


def test_every_part_is_as_large_as_its_readme_says(rows: list[list[str]]) -> None:
    readme = (CORPUS.parent.parent / "README.md").read_bytes().decode()
    told = {name: int(count.replace(",", "")) for name, count in re.findall(r"corpus: (\w+)` \| ([\d,]+) \|", readme)}
    found = {name: len(part(rows, name)) for name in ("natural", "grammar")}
    assert told == {**found, "dirty": len(rows) - sum(found.values())}
    assert told["grammar"] >= 2000
    assert told["natural"] >= 200


@pytest.mark.parametrize("name", ["grammar", "natural"])
def test_no_two_sentences_share_a_key_so_a_grouped_split_holds_out_single_rows(
    rows: list[list[str]], name: str
) -> None:
    pairs = part(rows, name)
    assert len({key(en) for en, _ in pairs}) == len({key(zh) for _, zh in pairs}) == len(pairs)


def test_good_sentences_have_plain_english_and_full_width_chinese_punctuation(rows: list[list[str]]) -> None:
    for en, zh in part(rows, "grammar") + part(rows, "natural"):
        assert re.fullmatch(r"""[A-Z"][A-Za-z0-9 ,.?!:;'"%-]*[.?!"]""", en), en
        assert re.search(r"[。？！”]$", zh), zh
        assert not re.search(r"[;?!()\"' ]|(?<!\d),|,(?!\d)", zh), zh
        assert en == " ".join(en.split())


def test_grammar_sentences_hold_words_and_the_plainest_punctuation_only(rows: list[list[str]]) -> None:
    for en, zh in part(rows, "grammar"):
        assert re.fullmatch(r"[A-Z][A-Za-z ,'.-]*[.?]", en), en
        assert re.fullmatch(r"[\u4e00-\u9fff，]+[。？]", zh), zh
        assert en.endswith("?") == zh.endswith("？")


def test_traditional_rows_become_the_sentences_that_the_grammar_made(rows: list[list[str]]) -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from mini_grammar import sentences
    finally:
        sys.path.pop(0)
    found = part(rows, "grammar")
    made = list(sentences(len(found), seed=1))
    assert [(en, simplify(zh)) for en, zh in found] == made
    # A sentence may have no character that differs.
    assert 0.95 < 40 / len(found) * sum(pair != plain for pair, plain in zip(found, made, strict=True)) <= 1
    assert all(simplify(zh) == zh for _, zh in made)
    assert sum(simplify(zh) != zh for _, zh in part(rows, "natural")) == 12


def test_sentences_checked_by_hand_are_there(rows: list[list[str]]) -> None:
    golden = [tuple(line.split("|")) for line in GOLDEN.strip().split("\n")]
    assert set(golden) <= set(part(rows, "grammar"))


def test_numbers_say_the_same_in_both_languages() -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from mini_words import chinese_number, english_number
    finally:
        sys.path.pop(0)
    words = {word: value for value, word in enumerate(re.findall(r"\w+", ENGLISH_DIGITS))}
    words |= {word: 10 * value for value, word in enumerate(re.findall(r"\w+", ENGLISH_TENS), 2)}
    signs = {sign: value for value, sign in enumerate("零一二三四五六七八九")} | {"两": 2}
    for number in range(1000):
        value = 0
        for word in english_number(number).replace("-", " ").replace(" and ", " ").split():
            value = value * 100 if word == "hundred" else value + words[word]
        assert value == number
        value, digit = 0, None
        for sign in chinese_number(number):
            if sign in "十百":
                value += (1 if digit is None else digit) * {"十": 10, "百": 100}[sign]
                digit = None
            else:
                digit = signs[sign]
        assert value + (digit or 0) == number
    assert [chinese_number(n) for n in (2, 12, 20, 105, 110, 222)] == [
        "两",
        "十二",
        "二十",
        "一百零五",
        "一百一十",
        "两百二十二",
    ]


def test_clean_keeps_every_good_sentence_and_drops_about_half_of_the_dirty_lines(tmp_path: Path) -> None:
    settings = CleanConfig(dev_size=200, test_size=200)
    report = clean_corpus(find_sources(CORPUS.parent.parent, settings), settings, tmp_path, workers=1)
    parts = Counter(line for name in ("train", "dev", "test") for line in read_lines(tmp_path / f"{name}.attribution"))
    assert parts["nmt mini corpus: grammar"] == 6000
    assert parts["nmt mini corpus: natural"] == 265
    assert 20 <= parts["nmt mini corpus: dirty"] <= 35
    assert sum(rule["rows"] for rule in report["dropped"].values()) == report["input"] - parts.total()


def test_every_kind_of_dirt_is_there(rows: list[list[str]]) -> None:
    raw = CORPUS.read_bytes()
    text = raw.decode(errors="replace")
    for sign in (
        "\u200b",
        "\u00a0",
        "\u3000",
        "\ufeff",
        "\u2028",
        "\u00ad",
        "\x07",
        "\ufffd",
        "&amp;",
        "ｗ",
        "â€™",
        "ﬁ",
    ):
        assert sign in text, repr(sign)
    assert b"\r\n" in raw
    assert re.search(rb"\r[^\n]", raw)
    assert b"\0" not in raw, "git would take the file for a binary one"
    invalid = 0
    for line in raw.split(b"\n"):
        try:
            line.decode()
        except UnicodeDecodeError:
            invalid += 1
    assert 0 < invalid < 0.01 * len(rows)
    assert Counter(map(len, rows))[1] >= 2
    assert any(row[0] == row[1] for row in rows if len(row) > 1)


def test_looking_up_the_most_similar_sentence_scores_far_below_what_a_model_must_reach(rows: list[list[str]]) -> None:
    def grams(text: str) -> set[str]:
        return {text[start : start + 3] for start in range(len(text) - 2)}

    pairs = [(en, simplify(zh)) for en, zh in part(rows, "grammar")]
    test, train = pairs[::20], [pair for number, pair in enumerate(pairs) if number % 20]
    known = [grams(en) for en, _ in train]
    holders: dict[str, list[int]] = defaultdict(list)
    for number, found in enumerate(known):
        for gram in found:
            holders[gram].append(number)
    copied = []
    for en, _ in test:
        wanted = grams(en)
        shared = Counter(number for gram in wanted for number in holders[gram])
        best = max(shared, key=lambda i: (shared[i] / (len(wanted) + len(known[i]) - shared[i]), -i))
        copied.append(train[best][1])
    baseline = sacrebleu.corpus_bleu(copied, [[zh for _, zh in test]], tokenize="zh").score
    assert 20 < baseline < 50
