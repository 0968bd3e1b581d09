"""Repairs that need both sides of a pair; each is idempotent. `translate` does none of them."""

import re
from collections import Counter
from collections.abc import Callable

Sides = tuple[str, str]

LONGEST = 20_000
"""Characters of a side above which it is left alone: no sentence, and the rules drop it."""

_NOTE = re.compile("[（(](?:注|译注|译者注|編注|编注|譯注|譯者注)[：:][^（）()]*[）)]")
_NOTE_ON_OTHER_SIDE = re.compile(
    r"\b(?:notes?|n\.b\.) ?[:：]|[(\[](?:note|n\.b|ed|trans)\b|\b(?:translator|editor)\b|[（(【](?:注|译|譯)",
    re.IGNORECASE,
)
_BRACKET = re.compile(r"[(（\[](?!(?:tm|r|c)\))", re.IGNORECASE)
_NAME_OR_NUMBER = re.compile(r"[A-Z][A-Za-z0-9]+|[0-9]+")
_STAGE = re.compile(
    r" ?(?:\((?:laughter|applause|cheers|cheering|music)\)|（(?:笑声|笑聲|掌声|掌聲|鼓掌|欢呼|歡呼|音乐|音樂)）)",
    re.IGNORECASE,
)
_TAG = re.compile(r"(</?[A-Za-z][A-Za-z0-9]*(?:\s[^<>]*)?>)")
_CONTEXT = re.compile(r"^\?[a-z]+:")
_ACCELERATOR = re.compile(r"[（(]([_&])([A-Za-z0-9])[）)]")


def repair_pair(left: str, right: str) -> Sides:
    """Both sides without one-sided notes, stage directions, equal paired tags and keyboard accelerators."""
    if max(len(left), len(right)) > LONGEST:
        return left, right
    if "（" in left or "(" in left or "（" in right or "(" in right:
        left, right = _without_notes(left, right), _without_notes(right, left)
        left, right = _STAGE.sub("", left), _STAGE.sub("", right)
        left, right = _without_accelerators(left, right)
    if "<" in left and "<" in right:
        left, right = _without_equal_tags(left, right)
    return left, right


def _without_notes(text: str, other: str) -> str:
    """`text` without its notes, unless the other side has them too: by that name, in brackets, or by a name in them."""
    rest = _NOTE.sub("", text)
    if rest == text or _NOTE_ON_OTHER_SIDE.search(other):
        return text
    if len(_BRACKET.findall(other)) > len(_BRACKET.findall(rest)):
        return text
    in_notes = {name for note in _NOTE.findall(text) for name in _NAME_OR_NUMBER.findall(note)}
    return text if in_notes & (set(_NAME_OR_NUMBER.findall(other)) - set(_NAME_OR_NUMBER.findall(rest))) else rest


def _without_accelerators(left: str, right: str) -> Sides:
    """`?verb:_View` and `查看(_V)` as `View` and `查看`, whichever side is which."""
    for han, other, swapped in ((right, left, False), (left, right, True)):
        every = list(_ACCELERATOR.finditer(han))
        if len(every) != 1 or (plain := _without_accelerator(other, *every[0].groups())) is None:
            continue
        han = _ACCELERATOR.sub("", han)
        return (han, plain) if swapped else (plain, han)
    return left, right


def _without_accelerator(text: str, sign: str, key: str) -> str | None:
    """`text` without the sign before its key, or without `(&K)`; None if it has no such accelerator.

    The sign at the start of a word is likelier meant than one inside (`set_name _Now`), and between capitals & is no
    such sign at all (R&D).
    """
    text = _CONTEXT.sub("", text)
    inside = "(?<=[A-Za-z])(?<![A-Z](?=&[A-Z]))"
    letter = f"[{key.lower()}{key.upper()}]"
    for before, after in (("[（(]", "[）)]"), (r"(?<!\w)", ""), (inside, "")):
        if found := re.search(f"{before}{sign}({letter}){after}", text):
            return text[: found.start()] + ("" if after else found[1]) + text[found.end() :]
    return text if re.search(f"{sign}{letter}", text) else None


def _without_equal_tags(left: str, right: str) -> Sides:
    """Tags with an end taken off where both sides have the same ones; others stay and the rules compare them."""
    if Counter(_TAG.findall(left)) != Counter(_TAG.findall(right)):
        return left, right
    return _without_paired_tags(left), _without_paired_tags(right)


def _without_paired_tags(text: str) -> str:
    parts = _TAG.split(text)
    open_tags: list[tuple[str, int]] = []
    for index in range(1, len(parts), 2):
        name = re.split(r"[\s>]", parts[index].lstrip("</"), maxsplit=1)[0]
        if not parts[index].startswith("</"):
            if not parts[index].endswith("/>"):
                open_tags.append((name, index))
        elif open_tags and open_tags[-1][0] == name:
            parts[open_tags.pop()[1]] = parts[index] = ""
    return "".join(parts)


def repair_fully(sides: Sides, normalise: Callable[[Sides], Sides]) -> Sides:
    """Repair and normalise a normalised pair in turn until nothing changes."""
    while (repaired := repair_pair(*sides)) != sides:  # Each turn makes the pair shorter.
        sides = normalise(repaired)
    return sides


# ── for keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_REPAIRABLE = re.compile(r"[(\[{【〔<]|^\?")
_ROUND = str.maketrans("[{【〔]}】〕", "(((())))")
_ASIDE = re.compile(
    r"\((?:(?:译者?|编)?注:[^()]*|laughter|applause|cheers|cheering|music|笑声|掌声|鼓掌|欢呼|音乐|[_&][a-z0-9])\)"
    r"|^\?[a-z]+:"
)
"""What `repair_pair` takes off besides tags, in one spelling: no case, width, script, spaces or kinds of brackets."""


def bare(folded: str) -> str:
    """A text, folded as for a key, without all that `repair_pair` would take off it beside some other side."""
    if len(folded) > LONGEST or not _REPAIRABLE.search(folded):
        return folded
    text = "".join(_without_paired_tags(folded).translate(_ROUND).split())
    while (barer := _ASIDE.sub("", text)) != text:
        text = barer
    return text
