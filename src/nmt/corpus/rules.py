"""The rules of `clean`: pure functions of one normalised pair, in one table; the first that objects names the drop.

Rules look at the script of each side, found in the text; those about Chinese also at the language code, since Japanese
is written in Han characters too. Their defaults are for human translations: rules of the usual tools that reject most
of a good English-Chinese corpus (word ratios with Chinese split at spaces, numbers that must agree) are absent or off.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from nmt.config import CleanConfig
from nmt.corpus.mojibake import is_damaged, repair
from nmt.corpus.normalise import unknown_entities
from nmt.corpus.script import han_share, has_han, has_letter, is_chinese, is_japanese_or_korean, simplify, units

SHORT = 3
"""Words, units or bytes up to which a side is too short for a ratio to mean anything."""

LONGEST_WORD = 40
"""Characters that words or units may have on average before a side counts as too long."""


class Pair(NamedTuple):
    """Both sides of a row, normalised; `raw` is the row as found and `han` says which side is in Han characters."""

    sides: tuple[str, str]
    han: tuple[bool, bool]
    raw: tuple[str, str]


class Rule(NamedTuple):
    """A reason to drop a pair."""

    name: str
    setting: str
    """What it goes by in CleanConfig; none for what no training can use."""
    rejects: Callable[[Pair, CleanConfig], bool]
    means: str


def _chinese_sides(pair: Pair, settings: CleanConfig) -> Iterator[str]:
    for text, is_han, lang in zip(pair.sides, pair.han, settings.columns, strict=True):
        if is_han and is_chinese(lang):
            yield text


def _length(text: str, is_han: bool) -> int:
    return units(text) if is_han else len(text.split())


def _damaged(pair: Pair, settings: CleanConfig) -> bool:
    return settings.drop_damaged and any(map(is_damaged, (*map(repair, pair.raw), *pair.sides)))


def _empty(pair: Pair, settings: CleanConfig) -> bool:
    return not all(pair.sides)


def _too_long(pair: Pair, settings: CleanConfig) -> bool:
    most = [settings.max_units if is_han else settings.max_words for is_han in pair.han]
    # A side of n characters has at most n words: most sides need no counting, nor does a word as long as a book.
    return any(
        len(text) > limit and (len(text) > LONGEST_WORD * limit or _length(text, is_han) > limit)
        for text, is_han, limit in zip(pair.sides, pair.han, most, strict=True)
    )


def _copy(pair: Pair, settings: CleanConfig) -> bool:
    one, two = pair.sides
    if not settings.drop_copies or has_han(one) != has_han(two):
        return False
    left, right = (_WORDS.findall(text.casefold()) for text in pair.sides)
    return left == right and bool(left)


_WORDS = re.compile(r"[^\W_]+")


def _no_han(pair: Pair, settings: CleanConfig) -> bool:
    return any(is_han and not has_han(text) for text, is_han in zip(pair.sides, pair.han, strict=True))


def _no_letter(pair: Pair, settings: CleanConfig) -> bool:
    return not all(map(has_letter, pair.sides))


def _little_han(pair: Pair, settings: CleanConfig) -> bool:
    return any(
        is_han and han_share(text) < settings.min_han_share for text, is_han in zip(pair.sides, pair.han, strict=True)
    )


def _much_han(pair: Pair, settings: CleanConfig) -> bool:
    return any(
        not is_han and not text.isascii() and han_share(text) > settings.max_han_share
        for text, is_han in zip(pair.sides, pair.han, strict=True)
    )


def _ratio(pair: Pair, settings: CleanConfig) -> bool:
    if pair.han[0] == pair.han[1]:
        return False
    words, han_units = (
        _length(text, is_han)
        for is_han, text in sorted(zip(pair.han, pair.sides, strict=True), key=lambda side: side[0])
    )
    if max(words, han_units) <= SHORT:
        return False
    return not settings.min_ratio * han_units <= words <= settings.max_ratio * han_units


def _bytes(pair: Pair, settings: CleanConfig) -> bool:
    if max(map(_length, pair.sides, pair.han)) <= SHORT:
        return False
    short, long = sorted(len(text.encode(errors="replace")) for text in pair.sides)
    return long > settings.max_byte_ratio * short


_MARKUP = re.compile("[<$%&]")
# Only what is a tag for sure: `<name>` alone is what documentation writes for a name to be filled in.
_TAG = re.compile(r"</[A-Za-z][\w:]*>|<[A-Za-z][\w:]*(?:\s[^<>]*)?/>|<[A-Za-z][\w:]*\s[^<>=]*=[^<>]*>")
_FORMULA = re.compile(r"\$[^$]*[\\^_{}][^$]*\$")
_PLACEHOLDER = re.compile(
    r"(?<![0-9%])%(?:[0-9]+\$)?([-+0#]*[0-9]*(?:\.[0-9]+)?(?:hh|ll|[hlzjt])?[diouxXeEfgGcsp])(?![A-Za-z])"
)


def marks(text: str) -> Counter[str]:
    """Tags, formulas and printf placeholders (without their positions), each with its count."""
    return Counter(_TAG.findall(text) + _FORMULA.findall(text) + _PLACEHOLDER.findall(text))


def _markup(pair: Pair, settings: CleanConfig) -> bool:
    if not settings.drop_markup or not any(map(_MARKUP.search, pair.sides)):
        return False
    left, right = pair.sides
    return marks(left) != marks(right) or any(map(unknown_entities, pair.sides))


_TONE = re.compile("[āēīōūǖáéíóúǘǎěǐǒǔǚàèìòùǜ]", re.IGNORECASE)
_LEVEL_OR_DIPPING = re.compile("[āēīōūǖǎěǐǒǔǚ]", re.IGNORECASE)  # Names of other languages have the other two.
_LATIN_RUN = re.compile(r"[^\W\d_\u3000-\U0010ffff]+(?:[ ',.!?]+[^\W\d_\u3000-\U0010ffff]+)+")


def _kana(pair: Pair, settings: CleanConfig) -> bool:
    return settings.drop_kana and any(map(is_japanese_or_korean, _chinese_sides(pair, settings)))


def _glossed(pair: Pair, settings: CleanConfig) -> bool:
    """Pinyin beside the characters: at least two words in Latin letters with two tone marks or more among them."""
    return settings.drop_pinyin and any(
        is_han
        and not text.isascii()
        and _LEVEL_OR_DIPPING.search(text) is not None
        and any(map(_is_pinyin, _LATIN_RUN.findall(text)))
        for text, is_han in zip(pair.sides, pair.han, strict=True)
    )


def _is_pinyin(run: str) -> bool:
    return len(_TONE.findall(run)) >= 2 and _LEVEL_OR_DIPPING.search(run) is not None


def _wrong_script(pair: Pair, settings: CleanConfig) -> bool:
    return settings.zh_script == "filter" and any(simplify(text) != text for text in _chinese_sides(pair, settings))


_CANTONESE = re.compile("[嘅喺咗唔佢冇啲嚟哋]")


def _cantonese(pair: Pair, settings: CleanConfig) -> bool:
    # One such character may be a name: 泰唔士河.
    return settings.drop_cantonese and any(
        len(_CANTONESE.findall(text)) >= 2 for text in _chinese_sides(pair, settings)
    )


# Not \b: to it a Han character is a letter, and 2011年 would hold no number.
_NUMBER = re.compile(r"(?<![0-9.,])[0-9][0-9,]*(?:\.[0-9]+)?(?![0-9])(万|亿|萬|億)?")
_MYRIADS = {"万": 4, "萬": 4, "亿": 8, "億": 8}


def _long_numbers(text: str) -> set[str]:
    """Numbers of four digits or more and decimals, without commas, 万 and 亿 written out."""
    found = set()
    for match in _NUMBER.finditer(text):
        whole, _, part = match[0].removesuffix(match[1] or "").replace(",", "").partition(".")
        zeros = _MYRIADS.get(match[1] or "", 0)
        part = part.rstrip("0")
        whole, part = (whole + part[:zeros].ljust(zeros, "0")).lstrip("0"), part[zeros:]
        if part or len(whole) >= 4:
            found.add(f"{whole}.{part}")
    return found


def _numbers(pair: Pair, settings: CleanConfig) -> bool:
    if not settings.drop_numbers:
        return False
    left, right = map(_long_numbers, pair.sides)
    return bool(left and right) and not left & right


RULES = (
    Rule("damaged", "drop_damaged", _damaged, "characters lost to a wrong encoding"),
    Rule("empty", "", _empty, "a side without text"),
    Rule("length", "max_words, max_units", _too_long, "a side longer than the limit"),
    Rule("copy", "drop_copies", _copy, "both sides equal"),
    Rule("no_letter", "", _no_letter, "a side without a letter"),
    Rule("kana", "drop_kana", _kana, "Japanese or Korean on a Chinese side"),
    Rule("no_han", "", _no_han, "no Han character on the Han side"),
    Rule("pinyin", "drop_pinyin", _glossed, "Pinyin beside the characters"),
    Rule("han_share", "min_han_share", _little_han, "few Han characters on the Han side"),
    Rule("other_han", "max_han_share", _much_han, "Han characters on the other side"),
    Rule("ratio", "min_ratio, max_ratio", _ratio, "too few or too many words for the units"),
    Rule("bytes", "max_byte_ratio", _bytes, "one side too long for the other in bytes"),
    Rule("markup", "drop_markup", _markup, "tags, formulas, placeholders differ, or an unknown entity"),
    Rule("script", "zh_script", _wrong_script, "Traditional characters"),
    Rule("cantonese", "drop_cantonese", _cantonese, "Cantonese"),
    Rule("numbers", "drop_numbers", _numbers, "long numbers that all disagree"),
)
"""In the order that they are asked."""


def first_rejection(pair: Pair, settings: CleanConfig) -> str | None:
    """The name of the first rule that objects to the pair, or None."""
    return next((rule.name for rule in RULES if rule.rejects(pair, settings)), None)
