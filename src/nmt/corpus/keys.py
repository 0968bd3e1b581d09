"""Three keys of a text, for three questions that need different answers.

* `leak_key`: might a model know this sentence from that one? Coarse: letters and digits alone. For the guard between
  train and the held-out sets, and for the groups of the split, where a pair too many held out costs nothing.
* `reference_key`: are translations of this sentence translations of that one? Fine: numbers, signs, units, word
  boundaries and questions count. For further references, where one that is none would make every score wrong.
* `duplicate_key`: do two pairs teach the same? The reference keys of both sides.

`clean` holds 64 bits of the leak key of each side and of the duplicate key for every row, 24 bytes in all. Reference
keys are made of the rows of dev and test alone, when their references are written, and cost no memory for the others.
"""

import functools
import hashlib
import re
import unicodedata

from nmt.corpus.pair_repair import bare
from nmt.corpus.script import HAN, KANA, has_han, simplify

LEFT, RIGHT, PAIR = range(3)
"""What a hash is of: a side, or both together."""


def hash_key(kind: int, key: str) -> int:
    """64 bits of BLAKE2b, the same in every process and release; keys of different kinds have no hash in common."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"side%d" % kind)
    return int.from_bytes(digest.digest(), "little")


def _fold(text: str) -> str:
    """Case, compatibility forms (width among them) and script folded."""
    if text.isascii():
        return text.casefold()
    return simplify(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()))


_VARIATION_SELECTORS = {*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)}

# ── leak ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _LettersDigitsMarks(dict[int, int | None]):
    def __missing__(self, code: int) -> int | None:
        letter = unicodedata.category(chr(code))[0] in "LNM" and code not in _VARIATION_SELECTORS
        self[code] = kept = code if letter else None
        return kept


_KEPT = _LettersDigitsMarks()


def leak_key(text: str) -> str:
    """Letters, digits and marks, Simplified, compatibility forms and case folded; `text` itself if none is left.

    What a repair may remove is left out, whatever the other side is: a key is the same before and after a repair.
    """
    folded = _fold(text)
    return bare(folded).translate(_KEPT) or folded.translate(_KEPT) or text


# ── references and duplicates ─────────────────────────────────────────────────────────────────────────────────────────

_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9])")
_FORMS = {ord(power): f"^{digit}" for power, digit in zip("⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ", "0123456789n", strict=True)}
_FORMS |= dict.fromkeys(map(ord, "‐‑‒–−"), "-") | {ord("〜"): "~"}
_FORM = re.compile(f"[{''.join(map(chr, _FORMS))}]")

_WORD = f"[^\\W_{HAN}{KANA}]"  # A letter of a word that spaces set apart, or a digit.
_SPACED = re.compile(r""" (?<=[0-9] )([-~.,:;'"!()]) (?=[0-9])""")
_MEANT = re.compile(
    rf"""[-~.,:;'"!()](?:                                            # The mark, and where it stands:
        (?<=[0-9].)(?=[0-9])                                         # 1.5, 3:2, 2-3, 5'10; but 1. 5 has a full stop
      | (?<=[-~])(?<!{_WORD}.)(?<![-~].)(?=[ ]?[^\w\s"'(~-]?\.?[0-9])  # -5, -$5, ~5
      | (?<=\.)(?<!{_WORD}.)(?<!\..)(?={_WORD})                      # .5, .net
      | (?<=\s-)-?(?=[a-z])                                          # the option --force
      | (?<=!)(?==)                                                  # !=
      | (?<=[:;])-?[()](?!\w)                                        # :-)
    )""",
    re.VERBOSE,
)
"""Marks that mean something where they stand; elsewhere they only set parts of a sentence apart."""

_SIGNS = frozenset("?؟%‰‱&@#*/\\_§′†‡")
"""Punctuation by Unicode's categories that is meant wherever it stands, as symbols (+ = $ € ° and emoji) are."""
_QUOTES = frozenset("`´¨~")
"""Symbols by Unicode's categories that are used as punctuation."""


def _keep(found: re.Match[str]) -> str:
    """The full-width form: folded text has none, so what stands there is no punctuation any more."""
    return "".join(chr(ord(mark) + 0xFEE0) for mark in found[0])


class _WithoutPunctuation(dict[int, str | int | None]):
    def __missing__(self, code: int) -> str | int | None:
        mark = chr(code)
        category = unicodedata.category(mark)
        kept: str | int | None = code
        punctuation = category[0] == "P" and mark not in _SIGNS and not 0xFF00 < code < 0xFF5F
        if punctuation or mark in _QUOTES or mark.isspace():
            kept = " "
        elif category in ("Cc", "Cf") or code in _VARIATION_SELECTORS:
            kept = None
        self[code] = kept
        return kept


_WITHOUT_PUNCTUATION = _WithoutPunctuation()
_LETTER = f"[^\\W\\d_{HAN}{KANA}]"
_GAP = re.compile(f" (?:(?<!{_LETTER} )|(?!{_LETTER}))")
_QUESTION = re.compile("[?؟]+")


@functools.cache
def _kind(character: str) -> str:
    """`word` or `number` for what a space can end; nothing for Han characters, kana and signs, which need none."""
    if has_han(character):
        return ""
    return {"L": "word", "M": "word", "N": "number"}.get(unicodedata.category(character)[0], "")


def _close(found: re.Match[str]) -> str:
    before, after = (_kind(found.string[place]) for place in (found.start() - 1, found.end()))
    return " " if before and before == after else ""


def reference_key(text: str) -> str:
    """The text without case, width, script, and marks and spaces that change no meaning; itself if nothing is left.

    Numbers stay apart by their decimal points, signs and units, words by the spaces, hyphens and apostrophes between
    them (`we're`, `were`), and questions from statements. A thousands comma is none: `1,200` is `1200`.
    """
    if "," in text:
        text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    folded = _SPACED.sub(r"\1", _fold(text.translate(_FORMS) if _FORM.search(text) else text))
    words = _MEANT.sub(_keep, folded).translate(_WITHOUT_PUNCTUATION).split()
    return _QUESTION.sub("?", _GAP.sub(_close, " ".join(words))) or text


def duplicate_key(left: str, right: str) -> str:
    """Equal for pairs of which one is enough to train on."""
    return f"{reference_key(left)}\n{reference_key(right)}"
