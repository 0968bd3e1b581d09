"""Which script a text is written in, and Traditional and Simplified Chinese: a side counts as Chinese for its text."""

import functools
import re
from collections.abc import Iterable
from typing import Any, Literal

HAN = "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
"""The inside of a character class: Han characters, the repetition mark and the round zero among them."""

_HAN = re.compile(f"[{HAN}]")
_LETTER = re.compile(r"[^\W\d_]")
_UNIT = re.compile(rf"[{HAN}]|[^\W_{HAN}]+")

# OpenCC leaves 著 alone, since it is also a character of its own (著名, 顯著, 所著); as the suffix of a verb it is 着.
_ZHE = re.compile("(?<![原名巨专编论译合遗显卓昭土拙所])著(?![名作者称述录]|书立说)")


def has_han(text: str) -> bool:
    return _HAN.search(text) is not None


def has_letter(text: str) -> bool:
    return _LETTER.search(text) is not None


def han_share(text: str) -> float:
    """Han characters as a share of the letters of `text`; 0 if it has no letter."""
    return len(_HAN.findall(text)) / max(1, len(_LETTER.findall(text)))


def units(text: str) -> int:
    """Han characters plus runs of other letters and digits: what a Chinese text has in place of words."""
    return len(_UNIT.findall(text))


def is_han_side(lines: Iterable[str]) -> bool:
    """Whether at least half of the lines that are not blank have a Han character."""
    seen = [has_han(line) for line in lines if line.strip()]
    return 2 * sum(seen) >= len(seen) > 0


@functools.cache
def _converter(name: str) -> Any:
    import opencc  # Here, so that a machine that only trains or translates from English can do without it.

    return opencc.OpenCC(name)


def simplify(text: str) -> str:
    """Traditional characters as Simplified ones, by OpenCC's t2s and the rule for 著; other text stays."""
    if text.isascii():
        return text
    return str(_ZHE.sub("着", _converter("t2s").convert(text)))


def traditionalise(text: str) -> str:
    """Text with characters that only Simplified Chinese has, converted by OpenCC's s2tw; other text stays."""
    if text.isascii() or not _only_simplified().search(text):
        return text  # The conversion could also change what is right in Traditional text, such as 皇后 and 里程.
    return str(_converter("s2tw").convert(text))


@functools.cache
def _only_simplified() -> re.Pattern[str]:
    """A character that s2t changes, t2s doesn't, and Big5, the old encoding of Traditional Chinese, doesn't have."""
    every = [chr(code) for code in range(0x4E00, 0xA000)]
    forms = (_converter(name).convert("\n".join(every)).split("\n") for name in ("s2t", "t2s"))
    only = "".join(a for a, s2t, t2s in zip(every, *forms, strict=True) if a == t2s != s2t and not _in_big5(a))
    return re.compile(f"[{only}]")


def _in_big5(character: str) -> bool:
    return bool(character.encode("big5", "ignore"))


Script = Literal["simplified", "traditional", "mixed", "neutral"]


def script_of(text: str) -> Script:
    """Simplified or Traditional by the characters that only one of them has; neutral without such a character."""
    traditional = not text.isascii() and _converter("t2s").convert(text) != text
    simplified = not text.isascii() and _only_simplified().search(text) is not None
    if traditional:
        return "mixed" if simplified else "traditional"
    return "simplified" if simplified else "neutral"
