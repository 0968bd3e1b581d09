"""What can be mended only with both sides in view; each leaves a mended pair as it is. `translate` does none of it."""

import re
from collections import Counter
from collections.abc import Callable

Sides = tuple[str, str]

LONGEST = 20_000
"""Characters of a side above which it is left alone: no sentence, and the rules drop it."""

_NOTE = re.compile("[（(](?:注|译注|译者注|編注|编注|譯注|譯者注)[：:][^（）()]*[）)]")
_NOTE_ON_OTHER_SIDE = re.compile(r"\((?:note|translator|ed)\b|（注|（译|（譯", re.IGNORECASE)
_STAGE = re.compile(
    r" ?(?:\((?:laughter|applause|cheers|cheering|music)\)|（(?:笑声|笑聲|掌声|掌聲|鼓掌|欢呼|歡呼|音乐|音樂)）)",
    re.IGNORECASE,
)
_TAG = re.compile(r"(</?[A-Za-z][A-Za-z0-9]*(?:\s[^<>]*)?>)")
_CONTEXT = re.compile(r"^\?[a-z]+:")
_HAN_ACCELERATOR = re.compile(r"[（(]([_&])([A-Za-z0-9])[）)]")


def mend(left: str, right: str) -> Sides:
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
    return text if _NOTE_ON_OTHER_SIDE.search(other) else _NOTE.sub("", text)


def _without_accelerators(left: str, right: str) -> Sides:
    """`?verb:_View` and `查看(_V)` as `View` and `查看`, whichever side is which."""
    for han, other, swapped in ((right, left, False), (left, right, True)):
        every = list(_HAN_ACCELERATOR.finditer(han))
        found = every[0] if len(every) == 1 else None
        if found and re.search(re.escape(found[1]) + found[2], other, re.IGNORECASE):
            han = _HAN_ACCELERATOR.sub("", han, count=1)
            other = re.sub(f"{re.escape(found[1])}(?={found[2]})", "", _CONTEXT.sub("", other), count=1, flags=re.I)
            return (han, other) if swapped else (other, han)
    return left, right


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


def mend_wholly(sides: Sides, normalise: Callable[[Sides], Sides]) -> Sides:
    """A normalised pair, mended and normalised in turn until nothing changes."""
    while (mended := mend(*sides)) != sides:  # Each turn makes the pair shorter.
        sides = normalise(mended)
    return sides


# ── for keys ────────────────────────────────────────────────────────────────────────────────────────────────────────

_MENDABLE = re.compile(r"[(\[{【〔<]|^\?")
_ROUND = str.maketrans("[{【〔]}】〕", "(((())))")
_ASIDE = re.compile(
    r"\((?:(?:译者?|编)?注:[^()]*|laughter|applause|cheers|cheering|music|笑声|掌声|鼓掌|欢呼|音乐|[_&][a-z0-9])\)"
    r"|^\?[a-z]+:"
)
"""What `mend` takes off besides tags, in one spelling: without case, width, script, spaces and kinds of brackets."""


def bare(folded: str) -> str:
    """What is left of a text, folded as for a key, without all that `mend` would take off it beside some other side."""
    if len(folded) > LONGEST or not _MENDABLE.search(folded):
        return folded
    text = "".join(_without_paired_tags(folded).translate(_ROUND).split())
    while (barer := _ASIDE.sub("", text)) != text:
        text = barer
    return text
