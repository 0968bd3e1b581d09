"""The bundled corpus: made by its script, in cmn's layout, learnable, and not to be had by looking up."""

import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import sacrebleu

from nmt.corpus.script import simplify

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "make_mini_corpus.py"
CORPUS = ROOT / "data" / "mini" / "raw" / "mini.txt"
PARTS = ("natural", "grammar", "dirty")

GOLDEN = {
    "Alice did not borrow those six pencils in the office yesterday afternoon.": "爱丽丝昨天下午在办公室里没有借那六支铅笔。",
}


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
    assert told["grammar"] >= 2000 and told["natural"] >= 200 and 30 <= told["dirty"] <= 60


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
        assert not re.search(r"[,;?!()\"' ]", zh), zh
        assert en == " ".join(en.split())


def test_a_grammar_sentence_begins_with_its_english_and_chinese_words_only(rows: list[list[str]]) -> None:
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
    assert sum(pair != plain for pair, plain in zip(found, made, strict=True)) == len(found) // 40
    assert all(simplify(zh) == zh for _, zh in made)
    assert sum(simplify(zh) != zh for _, zh in part(rows, "natural")) == 12


def test_sentences_checked_by_hand_are_there(rows: list[list[str]]) -> None:
    found = dict(part(rows, "grammar"))
    assert {en: found.get(en) for en in GOLDEN} == GOLDEN


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
    assert b"\r\n" in raw and re.search(rb"\r[^\n]", raw)
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
    floor = sacrebleu.corpus_bleu(copied, [[zh for _, zh in test]], tokenize="zh").score
    assert 20 < floor < 50
