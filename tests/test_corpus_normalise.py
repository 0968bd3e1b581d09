"""One line into its normal form: properties that hold for any text, and agreement with Unicode and OpenCC."""

import pickle
import sys
import time
import unicodedata

import opencc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.corpus import Normaliser
from nmt.corpus import normalise as module
from nmt.corpus.script import is_han_side, script_of, simplify, traditionalise, units
from nmt.errors import DataError

POLICIES = ("simplified", "traditional", "keep", "filter")
HAN_SIDES = {"en": False, "zh": True, "fr": False}

# Text made of what the rules are about, which random Unicode hardly ever is.
PIECES = [
    *"，。！？：；、（）「」『』“”‘’《》…·•—～,.!?:;()[]\"'`$%&<>=/\\ -_",
    *"\t\r\x0b\x85\u2028\u3000\xa0\u200b\u200c\u200d\xad\ufeff",
    *"的一是不了人我在有他这這中国國著着说說后後里裡裏发發干乾麼么佢嘅２３ＡｂＺ％￥＂＇．，﹐﹒﹖｡､\uf9d1\u0301\u0345ñéǎ",
    *[
        "&amp;",
        "&lt;",
        "&#39;",
        "& amp;",
        "&nbsp;",
        "&prod;",
        "&#x26;",
        "amp;",
        "#38;",
        "Tom",
        "a",
        "1",
        "23",
        " 's",
        " n't",
    ],
    *[
        "<b>",
        "</b>",
        "%s",
        "...",
        "皇后",
        "里程",
        "显著",
        "\x8b",
        "ã\x80\x82",
        "\ufffd",
        "▁",
        "😀",
        "👩\u200d💻",
        "か",
        "Ω",
        "İ",
        "ß",
    ],
]
texts = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))


@given(texts, st.sampled_from(POLICIES), st.sampled_from(["en", "zh", "fr"]))
def test_normalising_twice_is_normalising_once(text, policy, lang):
    normalise = Normaliser(policy, HAN_SIDES)
    once = normalise(text, lang)
    assert normalise(once, lang) == once


@given(texts, st.sampled_from(POLICIES), st.sampled_from(["en", "zh"]))
def test_a_normalised_line_is_one_line_of_nfc_without_tabs_controls_or_outer_spaces(text, policy, lang):
    found = Normaliser(policy, HAN_SIDES)(text, lang)
    assert found == found.strip()
    assert found == unicodedata.normalize("NFC", found)
    assert "  " not in found
    assert "\u2581" not in found
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or (c.isspace() and c != " ") for c in found)


def test_exactly_the_format_and_control_characters_of_unicode_are_deleted():
    joiners = {"\u200c", "\u200d"}  # They depend on what is before them.
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        category = unicodedata.category(character)
        if category != "Cn" and character not in joiners:  # Cn: this release of Python doesn't know it.
            deleted = module._FORMAT.fullmatch(character) is not None
            assert deleted == (category in ("Cf", "Cc", "Cs") and not character.isspace()), hex(code)


def test_joiners_stay_where_a_script_or_an_emoji_needs_them():
    normalise = Normaliser("simplified", HAN_SIDES)
    for text in ("می\u200cخواهم", "क्\u200dष", "👩\u200d💻"):
        assert normalise(text, "en") == text
    assert normalise("re\u200cad", "en") == "read"


def test_letters_and_digits_fold_as_nfkc_has_them_and_chinese_marks_stay():
    normalise = Normaliser("keep", HAN_SIDES)
    for code in (*range(0xFF10, 0xFF1A), *range(0xFF21, 0xFF3B), *range(0xFF41, 0xFF5B)):
        assert normalise(chr(code), "zh") == unicodedata.normalize("NFKC", chr(code))
    assert normalise("你好，世界！（真的）？：；……", "zh") == "你好，世界！（真的）？：；……"


def test_simplified_is_what_opencc_says_but_for_one_suffix():
    t2s = opencc.OpenCC("t2s")
    every = [chr(code) for code in range(0x4E00, 0xA000) if chr(code) != "著"]
    assert [simplify(c) for c in every] == [t2s.convert(c) for c in every]
    assert simplify("沿著河走") == "沿着河走"
    assert simplify("名著、原著、著者") == "名著、原著、著者"


def test_traditional_text_is_left_alone_and_simplified_text_leaves_nothing_behind():
    for text in ("皇后的里程", "干涉", "台北"):
        assert traditionalise(text) == text
    for code in range(0x4E00, 0xA000):
        once = traditionalise(chr(code))
        assert traditionalise(once) == once


@pytest.mark.parametrize(
    ("text", "script"),
    [("开门", "simplified"), ("開門", "traditional"), ("开門", "mixed"), ("你好", "neutral"), ("Tom", "neutral")],
)
def test_the_script_of_a_line_is_told_by_characters_that_only_one_script_has(text, script):
    assert script_of(text) == script


def test_units_are_han_characters_and_runs_of_other_letters_and_digits():
    assert units("我用iPhone 15拍照。") == 6
    assert units("") == 0


def test_a_side_is_chinese_by_its_text():
    assert is_han_side(["你好", "", "Tom"])
    assert not is_han_side(["Hello", "a 字", "b"])
    assert not is_han_side([])


def test_french_keeps_the_space_before_its_marks():
    assert Normaliser("keep", HAN_SIDES)("Où est-il ?", "fr") == "Où est-il ?"
    assert Normaliser("keep", HAN_SIDES)("Where is he ?", "en") == "Where is he?"


def test_a_normaliser_is_the_same_after_a_pickle_and_after_its_file(tmp_path):
    normaliser = Normaliser("traditional", {"en": False, "zh": True})
    assert pickle.loads(pickle.dumps(normaliser)) == normaliser
    normaliser.save(tmp_path / "normalisation.json")
    assert Normaliser.load(tmp_path / "normalisation.json") == normaliser


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"zh_script": "other", "han": {}}', '{"zh_script": "keep", "han": 1}']
)
def test_a_file_that_is_no_normalisation_is_refused(tmp_path, text):
    (tmp_path / "n.json").write_text(text)
    with pytest.raises(DataError, match="nmt clean"):
        Normaliser.load(tmp_path / "n.json")


def test_an_unknown_language_is_refused_by_name():
    with pytest.raises(DataError, match="'de'"):
        Normaliser("keep", HAN_SIDES)("x", "de")


@pytest.mark.parametrize(
    "piece",
    [
        "(",
        "(中",
        "中(",
        "?",
        "中?",
        "a?",
        ".",
        "”.",
        "&amp;",
        "&",
        "<b>",
        "中 文 ",
        " ,",
        "中 ,",
        "'",
        '"',
        "\x8b",
        "\u0301\u0316",
    ],
)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_no_long_line_takes_more_than_linear_time(piece, lang):
    normalise = Normaliser("simplified", HAN_SIDES)
    start = time.process_time()
    normalise(piece * 30_000, lang)
    assert time.process_time() - start < 2
