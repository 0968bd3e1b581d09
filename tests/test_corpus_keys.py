"""The three keys: which sentences may leak into each other, which are references of one another, which are one."""

import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nmt.corpus import Normaliser
from nmt.corpus.guard import normalised_and_repaired
from nmt.corpus.keys import LEFT, PAIR, RIGHT, duplicate_key, hash_key, leak_key, reference_key

SAME = [
    ("Hello, World!", "hello world"),
    ("他說：「好。」", "他说“好”"),
    ("５月", "5月"),
    ("CAFE\u0301", "café"),
    ("ＱＱ！", "qq"),
    ("Go away!", "Go away."),
    ("No problem", "No problem."),
    ("So, where is it?", "So where is it ?"),
    ("What??", "What?!"),
    ("Mr. Smith", "Mr Smith"),
    ("Wait... what?", "Wait, what?"),
    ("活到老，学到老。", "活到老学到老"),
    ("约翰·史密斯", "约翰•史密斯"),
    ("我用 QQ 。", "我用QQ。"),
    ("他说——5个", "他说：5个"),
    ("好的～", "好的。"),
    ("twenty-one", "twenty one"),
    ("2 + 3 = 5", "2+3=5"),
    ("2 - 3", "2-3"),
    ("10 : 30", "10:30"),
    ("3–5 days", "3-5 days"),
    ("−5 度", "-5度"),
    ("- 5度", "-5度"),
    ("5 km", "5km"),
    ("5 ℃", "5°C"),
    ("50 %", "５０％"),
    ("It cost 1,200,000 yen", "It cost 1200000 yen."),
    ("\u2764\ufe0f 爱你", "\u2764爱你"),
    ("One\ttwo\u3000three", "One two three"),
    ("Every Tues\xadday", "Every Tuesday"),
    ("He left --5 came", "He left: 5 came"),
    ("Wait ...what", "Wait, what"),
    ("3〜5天", "3～5天"),
    ("これは 本です。", "これは本です"),
]

DIFFERENT_IN_MEANING = [
    # numbers
    ("1.5 kg", "15 kg"),
    ("$10.50", "$1050"),
    ("a .50 gun", "a 50 gun"),
    ("It was in year 1. 5 came.", "It was in year 1.5 came."),
    ("Rooms 1, 2", "Rooms 12"),
    ("房间号是101，102", "房间号是101102"),
    ("1、2", "12"),
    ("1 2", "12"),
    ("3:2", "32"),
    ("at 10:30", "at 1030"),
    ("1/2", "12"),
    ("3-5天", "35天"),
    ("3～5天", "35天"),
    ("5'10", "510"),
    ("10²米", "102米"),
    ("1½", "112"),
    ("Rooms 2024,123", "Rooms 2024123"),
    # signs
    ("-5度", "5度"),
    ("气温是-5度", "气温是5度"),
    ("−.5", ".5"),
    ("− 5度", "5度"),
    ("-$5", "$5"),
    ("-$.5", "$.5"),
    ("5 * 3", "5 3"),
    ("5 & 3", "5 3"),
    ("~5 kg", "5 kg"),
    ("2+3", "2-3"),
    ("2+3", "23"),
    ("2-3", "23"),
    ("3×4", "34"),
    ("a != b", "a = b"),
    ("a < b", "a > b"),
    ("C", "C++"),
    ("C", "C#"),
    (".NET is here", "Net is here"),
    ("Use --force now", "Use force now"),
    ("R&D", "RD"),
    ("@user left", "user left"),
    ("x_i", "x i"),
    ("§5", "5"),
    ("†Tom", "Tom"),
    ("‡Tom", "Tom"),
    ("I am here \U0001f600", "I am here \U0001f622"),
    ("I am here :)", "I am here :("),
    # units
    ("50%", "50"),
    ("50‰", "50%"),
    ("50‰", "50"),
    ("50‱", "50"),
    ("5″", "5"),
    ("5/3", "5 3"),
    ("€5", "$5"),
    ("5°", "5"),
    ("5 ′", "5 ″"),
    # words and questions
    ("你要回家。", "你要回家？"),
    ("No!", "No?"),
    ("Tom left.", "Tom left?!"),
    ("We're friends.", "Were friends."),
    ("It is now here.", "It is nowhere."),
    ("I re-sign.", "I resign."),
    ("कि का", "किका"),
    ("ماذا؟", "ماذا"),
]
"""Pairs that share all letters and digits."""

DIFFERENT = [("???", "!!!"), ("a", "b"), ("他来了", "她来了"), ("कि", "का"), ("5 kg", "5 km"), ("1.5", "1.6")]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_case_width_script_spaces_and_marks_without_meaning_change_no_key(one, other):
    assert reference_key(one) == reference_key(other)
    assert leak_key(one) == leak_key(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT_IN_MEANING)
def test_numbers_signs_units_words_and_questions_part_references_and_duplicates_but_never_a_leak(one, other):
    assert reference_key(one) != reference_key(other)
    assert duplicate_key(one, "x") != duplicate_key(other, "x")
    assert duplicate_key("x", one) != duplicate_key("x", other)
    assert leak_key(one) == leak_key(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_sentences_have_different_keys(one, other):
    assert reference_key(one) != reference_key(other)
    assert leak_key(one) != leak_key(other)


PIECES = [
    *"aZ5é中國?.,:;!~-+%'\"()/#&_ ^½²’”。，？（）",
    "\u3000",
    "1,200",
    "--",
    ":)",
    "...",
    "&amp;",
    "\u200b",
    "\ufe0f",
]
text = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@given(text, text)
@example("打开(_O)", "打开[_O]")
@example("It fell. (Applause)", "It fell【applause】")
def test_references_of_one_another_never_lie_on_both_sides_of_the_guard(one, other):
    one, other = f"x{one}中", f"x{other}中"
    if reference_key(one) == reference_key(other):
        assert leak_key(one) == leak_key(other)


@given(text)
def test_a_normalised_text_has_the_reference_key_of_its_own_normal_form(line):
    normalise = Normaliser("simplified", {"en": False, "zh": True})
    for lang in ("en", "zh"):
        normal = normalise(line, lang)
        assert reference_key(normalise(normal, lang)) == reference_key(normal)


BOTH = ["<b>", "</b>", "x", "了", "(Applause)", "（掌声）", "( 掌聲 )", "(laughter)", "（注：某）", "(译者注:某)"]
odd_en = st.lists(st.sampled_from([*BOTH, "_V", "?verb:"]), max_size=6).map("".join)
odd_zh = st.lists(st.sampled_from([*BOTH, "(_V)", "（&V）"]), max_size=6).map("".join)


@given(odd_en, odd_zh)
@example("?verb:_View", "查看(_V)")
@example("<b>Now</b>", "<b>现在</b>")
def test_mending_never_changes_a_leak_key(en, zh):
    normal, repaired = normalised_and_repaired(
        (f"{en} Here", f"{zh}这里"), Normaliser("simplified", {"en": False, "zh": True})
    )
    assert [leak_key(side) for side in repaired] == [leak_key(side) for side in normal]


def test_a_text_of_signs_alone_is_its_own_key():
    assert leak_key("(!)") == reference_key("(!)") == "(!)"
    assert leak_key("(Applause)") == leak_key("Applause")


def test_sides_and_pairs_have_no_hash_in_common():
    assert len({hash_key(kind, "ok") for kind in (LEFT, RIGHT, PAIR)}) == 3


def test_keys_are_the_same_in_another_process():
    code = "from nmt.corpus.keys import *\nprint(hash_key(1, leak_key('說。')), hash_key(2, duplicate_key('-5', '５')))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(hash_key(1, leak_key("說。"))), str(hash_key(2, duplicate_key("-5", "５")))]
