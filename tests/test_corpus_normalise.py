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

POLICIES = ("auto", "simplified", "traditional", "keep", "filter")
HAN_SIDES = {"en": False, "zh": True, "fr": False, "zh-TW": True, "ja": True}

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
        "看著",
        "著有",
        "Ã",
        "©",
        "â€",
        "™",
        "\x07",
        "\x00",
        "1，200，000",
        "101，102",
        'f("',
        '="',
        "`",
        "{",
        "Inc.",
        "Ω",
        "İ",
        "ß",
    ],
]
texts = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))


@given(texts, st.sampled_from(POLICIES), st.sampled_from(list(HAN_SIDES)))
def test_normalising_twice_is_normalising_once(text, policy, lang):
    normalise = Normaliser(policy, HAN_SIDES)
    once = normalise(text, lang)
    assert normalise(once, lang) == once


@given(texts, st.sampled_from(POLICIES), st.sampled_from(["en", "zh", "ja"]))
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


# What tells is above all the rest of the line; where it doesn't, only a verb or a known word before or after does.
ZHE = {
    "Simplified text has 著 only where it is right": {
        "他著有三本书": "他著有三本书",
        "《红楼梦》，曹雪芹著": "《红楼梦》，曹雪芹著",
        "西蒙著的《秋天》是一本书": "西蒙著的《秋天》是一本书",
        "他是著名的医生": "他是著名的医生",
        "进步显著，恶名昭著": "进步显著，恶名昭著",
        "两人合著。": "两人合著。",
        "李军等著；张伟编": "李军等著；张伟编",
    },
    "so has a line without a character that only one script has": {
        "曹雪芹著": "曹雪芹著",
        "曹雪芹著。": "曹雪芹著。",
        "王力等著。": "王力等著。",
        "Smith 著。": "Smith 著。",
        "新著": "新著",
        "名著、原著、著者": "名著、原著、著者",
        "著名": "著名",
        "土著": "土著",
        "他的著作": "他的著作",
    },
    "but 著 after a verb is no Simplified Chinese": {
        "我看著你": "我看着你",
        "沿著河走": "沿着河走",
        "他笑著。": "他笑着。",
        "我睡不著。": "我睡不着。",
        "你不必著急。": "你不必着急。",
        "她的穿著非常好。": "她的穿着非常好。",
        "走著瞧": "走着瞧",
        "我等著你": "我等着你",
        "他看著著名的山": "他看着著名的山",
    },
    "and in Traditional text it mostly follows one": {
        "他看著我們": "他看着我们",
        "他們著手進行": "他们着手进行",
        "飛機著陸了": "飞机着陆了",
        "執著的人": "执着的人",
        "我們在等著。": "我们在等着。",
        "開著有燈的車": "开着有灯的车",
        "他讀著《紅樓夢》": "他读着《红楼梦》",
        "他們爭論著": "他们争论着",
        "重新著手這件事": "重新着手这件事",
    },
    "but for those words and authors": {
        "顯著": "显著",
        "著名的畫": "著名的画",
        "他著有三本書": "他著有三本书",
        "曹雪芹著《紅樓夢》": "曹雪芹著《红楼梦》",
        "《紅樓夢》，曹雪芹著。": "《红楼梦》，曹雪芹著。",
        "他著書立說": "他著书立说",
        "這是他的新著": "这是他的新著",
        "他的論著": "他的论著",
    },
}


@pytest.mark.parametrize(("text", "simplified"), [case for cases in ZHE.values() for case in cases.items()])
def test_the_suffix_that_traditional_text_writes_as_zhu_is_told_from_the_word(text, simplified):
    assert simplify(text) == simplified
    assert simplify(simplified) == simplified


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


@pytest.mark.parametrize("policy", POLICIES)
def test_the_file_has_all_that_decides_the_normal_form(tmp_path, policy):
    made = Normaliser(policy, HAN_SIDES)
    made.save(tmp_path / "n.json")
    read = Normaliser.load(tmp_path / "n.json")
    for lang in HAN_SIDES:
        for text in ("這是「誰」的書？", "这是谁的书?", "Where is it ?", "勉強、勉强"):
            assert read(text, lang) == made(text, lang)


def test_a_file_of_the_first_version_is_read_as_it_was_meant(tmp_path):
    for script in ("simplified", "traditional", "keep", "filter"):
        (tmp_path / "n.json").write_text(f'{{"zh_script": "{script}", "han": {{"en": false, "zh": true}}}}')
        assert Normaliser.load(tmp_path / "n.json") == Normaliser(script, {"en": False, "zh": True})
    # It converted Traditional codes and Japanese too. The former can still be done, the latter never again.
    (tmp_path / "n.json").write_text('{"zh_script": "simplified", "han": {"en": false, "zh-TW": true}}')
    assert Normaliser.load(tmp_path / "n.json")("誰", "zh-TW") == "谁"
    (tmp_path / "n.json").write_text('{"zh_script": "simplified", "han": {"en": false, "ja": true}}')
    with pytest.raises(DataError, match="treated ja as Chinese; run `nmt clean` again"):
        Normaliser.load(tmp_path / "n.json")


def test_a_script_is_chosen_by_the_code_of_the_language_and_by_its_text():
    wanted = {"zh": "simplified", "zh-TW": "traditional", "zh-Hant-SG": "traditional", "zh-Hans-TW": "simplified",
              "yue": "traditional", "yue-CN": "simplified", "zh-Latn": "keep", "ja": "keep", "ko": "keep"}  # fmt: skip
    assert {lang: Normaliser("auto", {lang: True}).policy(lang) for lang in wanted} == wanted
    assert {Normaliser("auto", {lang: False}).policy(lang) for lang in wanted} == {"keep"}
    assert Normaliser("simplified", {"zh-TW": True})("「誰」", "zh-TW") == "“谁”"
    assert Normaliser("auto", {"zh-TW": True})("皇后說「好」。这是谁的书?", "zh-TW") == "皇后說「好」。這是誰的書？"
    assert Normaliser("auto", {"zh-TW": True})("皇后說「好」。", "zh-TW") == "皇后說「好」。"


@pytest.mark.parametrize("policy", POLICIES)
def test_japanese_keeps_its_characters_and_marks(policy):
    normalise = Normaliser(policy, {"ja": True, "jpn": False})
    for text in ("勉強します。", "「日本語」、『国』!", "東京 (とうきょう), 2:30", "彼は著しい"):
        assert normalise(text, "ja") == text
    assert normalise("ＡＢＣ　１２３\u200b", "ja") == "ABC 123"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"zh_script": "other", "han": {}}',
        '{"zh_script": "keep", "han": 1}',
        '{"zh_script": [], "han": {}}',
    ],
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
        "`",
        "f(",
        '="',
        "[{",
        "<a",
        " -a",
        "1，",
        "100，",
        "题1：",
        "著",
        "看著",
        "Ã",
        "a\x07",
    ],
)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_no_long_line_takes_more_than_linear_time(piece, lang):
    normalise = Normaliser("simplified", HAN_SIDES)
    start = time.process_time()
    normalise(piece * 30_000, lang)
    assert time.process_time() - start < 2
