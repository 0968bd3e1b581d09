"""One line of one language into the form that the model sees: the same code for `clean` and for `translate`.

The order is mojibake, entities, control and format characters, spaces, width and NFC; then for a Chinese side script
and punctuation, for a side written with spaces punctuation. Japanese keeps its marks as found. A line is done when
another turn changes nothing, so normalised text is normalised again into itself.
"""

import functools
import html
import html.entities
import itertools
import json
import re
import typing
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nmt.corpus.mojibake import repair
from nmt.corpus.script import HAN, Policy, default_policy, has_han, is_chinese, simplify, traditionalise
from nmt.errors import DataError
from nmt.io import write_lines

ZhScript = Literal["auto", "simplified", "traditional", "keep", "filter"]

FORMAT = 2
"""Of the file; the first had none, and its version converted every side written in Han characters as Chinese."""

LARGEST_TURNS = 16
"""Turns after which a line is taken as it is; every step shortens a line or maps it one way, so 3 are rare."""


def _pairs(wide: str, narrow: str) -> dict[int, str]:
    return {ord(one): other for one, other in zip(wide, narrow, strict=True)}


# ── both sides ────────────────────────────────────────────────────────────────────────────────────────────────────────

_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_SPLIT_ENTITY = re.compile(r"& ?(amp|quot|apos|lt|gt|nbsp|#39) ?;")
_AMPERSANDS = re.compile(
    r"&(?:(?:amp|#38);)+"
)  # Escaped several times over; at once, so that no line takes many turns.
# Of the format characters, the joiners stay where a script needs them (Arabic, Indic) or an emoji is made of them.
_JOINS = "\u0600-\u109f\u1780-\u17ff\u200d\u2600-\u27bf\ufe0f\U0001f000-\U0001faff"
_FORMAT = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200e"
    "\u200f\u202a-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    f"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]|(?<![{_JOINS}])[\u200c\u200d]"
)
# A control character between two words stood for something that kept them apart.
_CONTROL_BETWEEN_WORDS = re.compile(rf"(?<=[^\W{HAN}])[\x00-\x08\x0e-\x1b\x7f]+(?=[^\W{HAN}])")
# NFKC would be wrong for Chinese: it makes half-width marks of ，！？（）： and three dots of an ellipsis.
_KEPT_WIDE = "！（），：；？～"
_WIDTH = {
    code: unicodedata.normalize("NFKC", chr(code))
    for code in (*range(0xFF01, 0xFF5F), *range(0xFF61, 0xFF65), *range(0xFFE0, 0xFFE7))
    if chr(code) not in _KEPT_WIDE
}
_WIDTH |= _pairs("﹐﹑﹒﹔﹕﹖﹗﹙﹚﹛﹜﹝﹞﹟﹠﹡﹢﹣﹤﹥﹦﹨﹩﹪﹫", "，、.；：？！（）{}〔〕#&*+-<>=\\$%@")
_WIDTH |= {0x2581: "_"}  # SentencePiece writes a space as U+2581.


def unknown_entities(text: str) -> list[str]:
    """Names such as `&product;` that HTML doesn't define: variables of some document."""
    return [found for found in _ENTITY.findall(text) if _entity(found) == found] if "&" in text else []


def _entity(found: str) -> str:
    return html.unescape(found) if found[1] == "#" else html.entities.html5.get(found[1:], found)


@functools.cache
def _many_marks() -> re.Pattern[str]:
    """A run of more combining marks than any language needs: over 30 (Unicode's Stream-Safe Text Format).

    Putting a run in order, as NFC does, takes the square of its length: hours for a line of a megabyte.
    """
    marks = "".join(map(chr, filter(lambda code: unicodedata.combining(chr(code)), range(0x300, 0x20000))))
    return re.compile(f"([{marks}]{{30}})[{marks}]+")


def _tidy(text: str) -> str:
    if "&" in text:
        text = _AMPERSANDS.sub("&", _SPLIT_ENTITY.sub(r"&\1;", text))
        text = _ENTITY.sub(lambda found: _entity(found[0]), text)
    if not text.isprintable():
        if 2 * text.count("\0") < len(text) - 1:  # Else it is UTF-16, whose zeros are part of its characters.
            text = _CONTROL_BETWEEN_WORDS.sub(" ", text)
        text = _FORMAT.sub("", text)
    if not text.isascii():
        text = unicodedata.normalize("NFC", _many_marks().sub(r"\1", text.translate(_WIDTH)))
    return " ".join(text.split())


# ── a side written in Han characters ──────────────────────────────────────────────────────────────────────────────────

_WIDE = "，。！？：；、（）《》〈〉【】「」『』“”"
_CJK = f"{HAN}{_WIDE}…·"
_NUMBERS = re.compile("(?<![0-9.])[0-9]+(?:，[0-9]+)+(?![0-9])")
_MORE_ITEMS = re.compile("[、和或与與及][0-9]")
_CLOCK_OR_RATIO = re.compile("(?<=[0-9])：(?=[0-9])")
_LABEL = re.compile("(?:[题題图圖表注骤驟问問答案]|(?<!比)例)[0-9]{1,9}$")
_APOSTROPHE = re.compile("(?<=[A-Za-z])’(?=[A-Za-z])")
_MIDDLE_DOT = re.compile(f"(?<=[{HAN}])[•‧・∙⋅](?=[{HAN}])")
_BRACKETS = re.compile(r"\(([^()（）]+)\)")
_CJK_MARK = re.compile(f"[{_CJK}]")
_SPACED_MARK = re.compile(rf"(?<=[{_CJK}]) (?=[,.?!:;](?![A-Za-z0-9:.]))")
_STOP_AFTER_HAN = re.compile(rf"(?<=[{_CJK}])[?!]+")
_STOP_AFTER_LATIN = re.compile(rf"(?<=[A-Za-z0-9])[?!]+(?=[”’）」』]|[{HAN}]|$)")
_COLON = re.compile(rf"(?<=[{_CJK}])(?::(?![:)(/\\DP-]|[A-Za-z_+-]+:)|;)")
_COMMA = re.compile(rf"(?<=[{_CJK}]),|,(?= ?[{HAN}“「《（])")
_FULL_STOP = re.compile(rf"(?<=[{_CJK}A-Za-z])\.(?=[”’）」』]*$)")
_ABBREVIATION = re.compile(
    r"(?<![A-Za-z])(?:Inc|Ltd|Co|Corp|Bros|Jr|Sr|Dr|Mr|Mrs|Ms|Prof|Gen|Col|Capt|Lt|Sgt|Rev|St|Mt|Ave|Blvd|Rd|No|Nos|Vol"
    r"|Fig|Ed|Eds|Dept|Univ|Assn|vs|etc|al|approx|est|ca|cf|vol|pp|fig|ed|eds|(?<=[A-Za-z] )[A-Za-z])\.[”’）」』]*$"
)
# Code and markup, whose quotation marks are straight: between backticks, a tag, the arguments of a call, a list or a
# mapping (not the text of a Markdown link), a value, an argument of a command, a string with a prefix or an escape.
_CODE = re.compile(
    r"""(?<!`)`+[^`]+`+|<[A-Za-z/][^<>]*>|[A-Za-z0-9_]\([^()]*\)|\{[^{}]*\}|\[[^\[\]]*\](?!\()|[\w\])] ?=?= ?"[^"]*"|"""
    r"""(?:(?:^| )--?[A-Za-z][\w-]*[ =]|\b(?:echo|extern|import|include|print|raise|require|return) ?)"[^"]*"|"""
    r"""\b(?:[bfru]|br|rb)"[^"]*"|\\"|"\\\w+"|"{3}""",
    re.ASCII,
)
_LATIN_GAP = re.compile(f"(?<=[{HAN}]) (?=[A-Za-z0-9])|(?<=[A-Za-z0-9]) (?=[{HAN}])")
_WIDE_GAP = re.compile(f" (?=[{_WIDE}])|(?<=[{_WIDE}]) ")
_SEGMENT = re.compile(rf"[{HAN}]{{1,4}}|[A-Za-z0-9]+|[^\w\s]+")
_HAN_GAP = re.compile(f"(?<=[{HAN}]) (?=[{HAN}])")
_MARK = re.compile('[!"(),.:;?’「」『』•‧・∙⋅]|[0-9][，：]')
_TO_WIDE = str.maketrans("?!:;,.", "？！：；，。")


def _widen(found: re.Match[str]) -> str:
    return found[0].translate(_TO_WIDE)


def _widen_brackets(found: re.Match[str]) -> str:
    before = found.string[max(0, found.start() - 1) : found.start()]
    if '"' in found[1] and before.isascii() and before.isalnum():  # The arguments of a call.
        return found[0]
    return f"（{found[1]}）" if has_han(found[1]) or _CJK_MARK.match(before) else found[0]


def _is_number(groups: list[str]) -> bool:
    """Whether digits between commas are one number for sure: no list has 000 or 050 in it, and hardly 1, 200, 345."""
    first, *rest = groups
    if len(first) > 3 or first[0] == "0" or any(len(group) != 3 for group in rest):
        return False
    return any(group[0] == "0" for group in rest) or (len(first) < 3 and len(rest) > 1)


def _narrow_commas(found: re.Match[str]) -> str:
    is_list = _MORE_ITEMS.match(found.string, found.end()) and "，0" not in found[0]
    return found[0].replace("，", ",") if _is_number(found[0].split("，")) and not is_list else found[0]


def _narrow_colon(found: re.Match[str]) -> str:
    return found[0] if _LABEL.search(found.string[max(0, found.start() - 12) : found.start()]) else ":"


def _curl_quotes(text: str) -> str:
    """Straight quotation marks as “ and ” in turn, but for those of code; none if they are no pairs."""
    code = {at for span in _CODE.finditer(text) for at in range(*span.span()) if text[at] == '"'}
    found = [at for at, sign in enumerate(text) if sign == '"' and at not in code]
    if len(found) % 2 or any(text[at - 1 : at].isdecimal() for at in found[::2]):  # 5'10" and 6'2" are inches.
        return text
    signs = dict(zip(found, itertools.cycle("“”"), strict=False))
    return "".join(signs.get(at, sign) for at, sign in enumerate(text))


def _punctuate_han(text: str, policy: Policy) -> str:
    """Full-width marks beside Han characters; quotes as the script has them; no spaces that only set words apart."""
    if not has_han(text):
        return text
    if " " in text:
        tokens = text.split(" ")
        if len(_HAN_GAP.findall(text)) >= 2 and all(map(_SEGMENT.fullmatch, tokens)):
            text = _HAN_GAP.sub("", text)
        text = _SPACED_MARK.sub("", text)
    if not _MARK.search(text):
        return _without_gaps(text)
    text = _CLOCK_OR_RATIO.sub(_narrow_colon, _NUMBERS.sub(_narrow_commas, text))
    text = _MIDDLE_DOT.sub("·", _APOSTROPHE.sub("'", text))
    if '"' in text:
        text = _curl_quotes(text)
    if policy == "simplified":
        text = text.translate(_SIMPLIFIED_QUOTES)
    text = _BRACKETS.sub(_widen_brackets, text)
    text = _STOP_AFTER_LATIN.sub(_widen, _STOP_AFTER_HAN.sub(_widen, text))
    text = _COMMA.sub(_widen, _COLON.sub(_widen, text))
    if text.count(".") == 1 and not _ABBREVIATION.search(text):
        text = _FULL_STOP.sub("。", text)
    return _without_gaps(text)


def _without_gaps(text: str) -> str:
    return _LATIN_GAP.sub("", _WIDE_GAP.sub("", text)) if " " in text else text


_SIMPLIFIED_QUOTES = str.maketrans("「」『』", "“”‘’")

# ── a side written with spaces ────────────────────────────────────────────────────────────────────────────────────────

_NARROW = _pairs("，。！？：；、（）～‘’‚‛“”„‟…", ",.!?:;,()~''''\"\"\"\".")
_NARROW |= {ord("…"): "..."}
_DOUBLE_STOP = re.compile(r"\.?。\.?")
_WIDE_BEFORE_WORD = re.compile(r"(?<![0-9])[，：](?=\w)|[，：](?=[^\W0-9])|[。！？；、）](?=\w)")
_WIDE_AFTER_WORD = re.compile(r"(?<=\w)（")
_LOOSE_MARK = re.compile(r"(?<=[^ ]) (?=[,.?!](?:[ \"')]|$))")
_SPACE_BEFORE_MARK = re.compile(" (?:[,.?!']|n')")
_CLITIC = re.compile(r"(?<=[A-Za-z]) (?=(?:'(?:s|re|ve|ll|m)|n't)\b(?!'))")


def _space_items(found: re.Match[str]) -> str:
    groups = found[0].split("，")
    may_be_number = len(groups) == 2 and len(groups[0]) <= 3 == len(groups[1])
    return ("," if may_be_number or _is_number(groups) else ", ").join(groups)


def _punctuate_spaced(text: str, lang: str) -> str:
    """ASCII marks, none with a space before it, and no apostrophe apart from its word."""
    if not text.isascii():
        text = _NUMBERS.sub(_space_items, text)
        text = _WIDE_BEFORE_WORD.sub(lambda found: found[0] + " ", _DOUBLE_STOP.sub("。", text))
        text = _WIDE_AFTER_WORD.sub(" （", text).translate(_NARROW)
    if lang != "fr" and _SPACE_BEFORE_MARK.search(text):  # French sets its marks apart.
        text = _CLITIC.sub("", _LOOSE_MARK.sub("", text))
    return text


# ── the whole ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Normaliser:
    """What `clean` does to a line and `translate` to its input; small and picklable."""

    zh_script: ZhScript
    han: Mapping[str, bool]
    """For each language whether its side is written in Han characters or kana, as found in the corpus itself."""

    def __call__(self, text: str, lang: str) -> str:
        """The line in normal form: one line, no TAB, and itself when normalised again."""
        if lang not in self.han:
            raise DataError(f"no normalisation for language {lang!r}; this corpus has {', '.join(self.han)}.")
        for _ in range(LARGEST_TURNS):
            before, text = text, self._turn(text, lang)
            if text == before:
                break
        return text

    def is_chinese(self, lang: str) -> bool:
        """Whether a side is Chinese by its code and by its text; Japanese is never converted."""
        return self.han[lang] and is_chinese(lang)

    def policy(self, lang: str) -> Policy:
        """The script that Chinese text of `lang` is converted to, or `keep`."""
        if not self.is_chinese(lang) or self.zh_script == "filter":
            return "keep"
        return default_policy(lang) if self.zh_script == "auto" else self.zh_script

    def _turn(self, text: str, lang: str) -> str:
        text = _tidy(repair(text))
        if not self.han[lang]:
            return _punctuate_spaced(text, lang)
        if not self.is_chinese(lang):
            return text  # Japanese has marks of its own, half-width ones too.
        policy = self.policy(lang)
        if policy == "simplified":
            text = simplify(text)
        elif policy == "traditional":
            text = traditionalise(text)
        return _punctuate_han(text, policy)

    @staticmethod
    def load(path: str | Path) -> "Normaliser":
        """The normaliser that `save` wrote."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            script, han = found["zh_script"], found["han"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"cannot read {path}: {error}; run `nmt clean` again.") from error
        if script not in typing.get_args(ZhScript) or not isinstance(han, dict):
            raise DataError(f"{path} isn't a normalisation that this version knows; run `nmt clean` again.")
        normaliser = Normaliser(script, {str(lang): bool(is_han) for lang, is_han in han.items()})
        if found.get("format", 1) < FORMAT and script != "keep":
            for lang in filter(normaliser.han.get, normaliser.han):
                if not normaliser.is_chinese(lang):
                    raise DataError(f"{path}: its version treated {lang} as Chinese; run `nmt clean` again.")
        return normaliser

    def save(self, path: str | Path) -> None:
        content = {"format": FORMAT, "zh_script": self.zh_script, "han": dict(self.han)}
        write_lines(path, [json.dumps(content, ensure_ascii=False)])
