"""languages: what a code says, and that what only looks like one is refused with the code that was meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.errors import ConfigError
from nmt.languages import _MISTAKEN, _NAMES, _SHORTEST, CHINESE, LONGEST, Language, name_of, parse


@pytest.mark.parametrize(
    ("code", "primary", "script", "region"),
    [
        ("en", "en", "", ""),
        ("zh", "zh", "", ""),
        ("zho", "zh", "", ""),
        ("ENG", "en", "", ""),
        ("zh_CN", "zh", "Hans", "CN"),
        ("zh-tw", "zh", "Hant", "TW"),
        ("zh-158", "zh", "Hant", "158"),
        ("zh-344", "zh", "Hant", "344"),
        ("zh-446", "zh", "Hant", "446"),
        ("zh-156", "zh", "Hans", "156"),
        ("zh-702", "zh", "Hans", "702"),
        ("zh-Hans-158", "zh", "Hans", "158"),
        ("zh-HK", "zh", "Hant", "HK"),
        ("zh-Hans-HK", "zh", "Hans", "HK"),
        ("zh-hant", "zh", "Hant", ""),
        ("zh-yue", "yue", "", ""),
        ("zh-cmn-Hans-CN", "cmn", "Hans", "CN"),
        ("lzh", "lzh", "", ""),
        ("pt-BR", "pt", "", "BR"),
        ("es-419", "es", "", "419"),
        ("eng_Latn", "en", "Latn", ""),
        ("sr-Cyrl-RS", "sr", "Cyrl", "RS"),
        ("zh-Latn-pinyin", "zh", "Latn", ""),
        ("de-CH-1996", "de", "", "CH"),
        ("en-US-x-twain", "en", "", "US"),
        ("qaa", "qaa", "", ""),
    ],
)
def test_a_code_says_its_language_script_and_region_in_any_spelling(code, primary, script, region):
    assert parse(code) == Language(primary, script, region)


def test_chinese_is_known_in_all_its_codes_and_nothing_else_is():
    for code in ("zh", "zho", "cmn", "zh-TW", "yue", "wuu", "lzh", "hak", "nan", "gan", "hsn", "zh_Hans", "zh-yue-HK"):
        assert parse(code).is_chinese, code
    for code in ("en", "ja", "ko", "za", "zu", "vi", "bo", "ii"):
        assert not parse(code).is_chinese, code
    assert all(parse(code).primary == code for code in CHINESE)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("cn", "zh"),
        ("CN", "zh"),
        ("chs", "zh-Hans"),
        ("cht", "zh-Hant"),
        ("zh-CHS", "zh-Hans"),
        ("chi", "zh"),
        ("Chinese", "zh"),
        ("chinese_simplified", "zh-Hans"),
        ("Mandarin", "zh"),
        ("Cantonese", "yue"),
        ("cn-CN", "zh-CN"),
        ("jp", "ja"),
        ("jp-JP", "ja-JP"),
        ("Japanese", "ja"),
        ("Englsh", "en"),
        ("ENGLISH", "en"),
        ("ger", "de"),
        ("ua", "uk"),
        ("cz", "cs"),
        ("iw", "he"),
    ],
)
def test_what_is_often_written_for_a_code_is_refused_with_the_code(wrong, meant):
    with pytest.raises(ConfigError, match=f"is not a language code; did you mean {meant}\\?$"):
        parse(wrong)


@pytest.mark.parametrize(
    "wrong", ["", "-", "../x", "xx", "qzz", "e", "en-", "zh--TW", "zh TW", "中文", "refs", "attribution", "zh\n",
              "zh-Abcd", "en-x", "ｅｎ", "zh-Hans-Hant", "en" + "-abcde" * 7, "K"]
)  # fmt: skip
def test_what_is_no_code_is_refused_with_an_example_of_one(wrong):
    with pytest.raises(ConfigError, match=r"give a language code, e\.g\. en, zh or pt-BR"):
        parse(wrong)


def test_every_code_that_is_proposed_is_one_and_no_real_code_is_taken_for_a_mistake():
    for wrong, meant in _MISTAKEN.items():
        parse(meant)
        with pytest.raises(ConfigError):
            parse(wrong)


def test_every_code_of_the_table_stands_once_and_has_a_name():
    assert len(_SHORTEST) == 184  # ISO 639-1 with Serbo-Croatian, which it has given up.
    assert not set(_SHORTEST) & set(_SHORTEST.values())
    for code, name in _NAMES.items():
        assert code.isalpha()
        assert len(code) in (2, 3)
        assert name_of(code) == name
        assert "\n" not in name
    assert name_of("zh_TW") == "Chinese"
    assert name_of("qab") == "qab"


@given(st.text(max_size=2 * LONGEST))
def test_any_text_is_a_code_that_its_parts_make_again_or_is_refused(text):
    try:
        found = parse(text)
    except ConfigError:
        return
    assert parse("-".join(filter(None, found))) == found
