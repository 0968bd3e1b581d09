"""Where a long text may be cut: at sentence ends, else at clauses, else at spaces, else between characters.

Pure functions for Chinese and English, and for lines that mix them. The parts of a text always join to that text.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

_END = re.compile(r"""([。！？｡]+|[.!?]+)([”’」』）)】\]》"']*)(\s*)""")
_QUOTE_CLOSED = re.compile("[”’」』\"']")
_OPEN, _CLOSE = "“「『（(【《[", "”」』）)】》]"  # ‘ ’ are left out: the second is an apostrophe too
_CLAUSE = re.compile(r"(?:[，；：、…—]+|[,;:]+(?=\s))\s*")
_SPACE = re.compile(r"\s+")
# With its marks, but no more of them than text has: a line may be nothing else.
_CHARACTER = re.compile(r".[\u0300-\u036f\u200d\ufe00-\ufe0f\U0001f3fb-\U0001f3ff]{0,30}", re.DOTALL)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEVER_END = _words(
    """mr mrs ms mx dr prof rev hon st mt gen col maj capt lt sgt gov sen rep pres fig figs no nos vol vols p pp ch sec
    eq ed eds cf vs viz al e.g i.e"""
)
"""Abbreviations of what is named right after them."""
_MAY_END = _words("inc ltd co corp bros jr sr etc dept est approx")
"""As single letters and letters with full stops do, these end a sentence only if a usual first word follows."""
_FIRST_WORDS = _words(
    """the this that these those there then here he she it we you they i his her its our your their my a an in on at but
    and so or as if when while after before for from with what why how who where no yes not some all many most"""
)
_NEAR = 32
"""Characters around a mark that are looked at."""


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, each with the space after it; quoted ones stay in the sentence that quotes them."""
    cuts, at, depth = [0], 0, 0
    for mark in _END.finditer(text):
        for character in text[at : mark.end()]:
            depth = depth + 1 if character in _OPEN else max(0, depth - 1) if character in _CLOSE else depth
        at = mark.end()
        if depth == 0 and _ends_sentence(text, mark):
            cuts.append(at)
    return _slices(text, cuts)


def _ends_sentence(text: str, mark: re.Match[str]) -> bool:
    sign, closing, space = mark.groups()
    after = text[mark.end() : mark.end() + _NEAR]
    first = after.lstrip(_OPEN + "‘\"'")[:1]
    if not first or sign[0] in "。｡":
        return True
    if sign[0] in "！？" or (sign[-1] in "!?" and _is_han(first)):
        # “你好！”他说。 goes on after the quotation.
        return not (_QUOTE_CLOSED.search(closing) and first.isalpha() and after[0] == first)
    if not space or first.islower():
        return False
    return sign != "." or not _is_abbreviation(text[max(0, mark.start() - _NEAR) : mark.start()], after)


def _is_abbreviation(before: str, after: str) -> bool:
    """Whether the full stop between these belongs to the word before it alone."""
    found = re.search(r"[^\W\d_]+(?:\.[^\W\d_]+)*$", before)
    word = found[0].lower() if found else ""
    if word in ("no", "nos"):  # may be an answer too
        return after[:1].isdigit()
    if word in _NEVER_END:
        return True
    next_word = re.match(r"\W*(\w*)", after)
    usual = next_word is not None and next_word[1].lower() in _FIRST_WORDS
    return (word in _MAY_END or "." in word or (len(word) == 1 and word.isascii() and word != "i")) and not usual


def _is_han(character: str) -> bool:
    return "\u3400" <= character <= "\u9fff" or character >= "\U00020000"


def _slices(text: str, cuts: Sequence[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([*cuts, len(text)]) if a < b]


def _split_after(pattern: re.Pattern[str]) -> Callable[[str], list[str]]:
    return lambda text: _slices(text, [0, *(found.end() for found in pattern.finditer(text))])


_WAYS: tuple[Callable[[str], list[str]], ...] = (
    split_sentences,
    _split_after(_END),  # inside quotations too
    _split_after(_CLAUSE),
    _split_after(_SPACE),
    _CHARACTER.findall,
)


def cut_to_fit(text: str, count: Callable[[Sequence[str]], list[int]], most: int) -> list[str]:
    """The text in parts of at most `most` tokens, where `count` gives the number of tokens of each text.

    Each sentence is a part of its own. One that is too long is cut at the best marks that do, into parts as long as
    they can be. A character alone may have more than `most` tokens.
    """
    return _cut(text, count, most, 0)


def _cut(text: str, count: Callable[[Sequence[str]], list[int]], most: int, way: int) -> list[str]:
    parts = _WAYS[way](text)
    if way > 0:
        parts = _join(parts, count(parts), most)
    if way + 1 == len(_WAYS):
        return parts
    found: list[str] = []
    for part, size in zip(parts, count(parts), strict=True):
        found += [part] if size <= most else _cut(part, count, most, way + 1)
    return found


def _join(parts: Sequence[str], sizes: Sequence[int], most: int) -> list[str]:
    """Neighbours joined as long as their sizes add up to `most` at the most."""
    found: list[list[str]] = []
    room = 0
    for part, size in zip(parts, sizes, strict=True):
        if found and size <= room:
            found[-1].append(part)
            room -= size
        else:
            found.append([part])
            room = most - size
    return ["".join(group) for group in found]
