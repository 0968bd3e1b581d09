"""Which encoding bytes are in, and whether a decoding gives text that people write.

UTF-8 tells by itself: text in another encoding is hardly ever valid. GB18030 and Big5 don't: each accepts nearly all of
the other's text, as other characters, most of them rare. So what was decoded is judged by the share of common ones.
"""

import functools
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

LEAST_COMMON = 0.8
"""Share of common characters among the Han characters of text. Of 1,000 of them, Tatoeba, news, medical text, captions
and manuals have at least 0.98, Simplified or Traditional; Big5 read as GB18030 at most 0.67, GBK read as Big5 0.78."""

FEWEST = 20
"""Han characters below which that share says nothing."""

MOST_BAD = 0.01
"""Share of lines that may have bytes which can't be decoded."""

SAMPLE = 1 << 20
"""Bytes that an encoding is guessed from."""

CANDIDATES = ("utf-8", "gb18030", "big5", "cp950", "big5-hkscs", "cp932", "euc-jp")
"""In the order in which they are tried. Python and iconv both know these names."""

# Private characters count as Han: the old encodings have their rarest ones there. Compatibility characters follow them.
_HAN = re.compile("[\u3400-\u9fff\ue000-\ufaff\U00020000-\U000323af]")


@functools.cache
def common_characters() -> frozenset[str]:
    """The first levels of GB 2312 (3,755 characters), Big5 (5,401) and JIS X 0208 (2,965), which hold the common ones.

    The standards order their characters by use, so each level is a range of codes.
    """
    high = range(0xA1, 0xFF)
    levels = {
        "gb2312": (range(0xB0, 0xD8), high),
        "big5": (range(0xA4, 0xC7), [*range(0x40, 0x7F), *high]),
        "euc-jp": (range(0xB0, 0xD0), high),
    }
    found = (
        bytes([lead, trail]).decode(encoding, "ignore")
        for encoding, (leads, trails) in levels.items()
        for lead in leads
        for trail in trails
    )
    return frozenset(text for text in found if _HAN.fullmatch(text))


def count_han(text: str) -> tuple[int, int]:
    """How many Han characters a text has, and how many of them are common ones."""
    han = [] if text.isascii() else _HAN.findall(text)
    return len(han), sum(map(common_characters().__contains__, han))


def is_plausible(han: int, common: int) -> bool:
    """Whether so many common ones among so many Han characters are what text has; always, where they are too few."""
    return han < FEWEST or common >= LEAST_COMMON * han


def is_utf_8(lines: Iterable[bytes]) -> bool:
    """Whether lines of which three or more are not ASCII are valid UTF-8, but for one in a hundred."""
    decodes = [_decodes(line, "utf-8") for line in lines if not line.isascii()]
    return len(decodes) >= 3 and decodes.count(False) <= MOST_BAD * len(decodes)


def utf_16(start: bytes) -> str:
    """`utf-16` or `utf-32` by the byte order mark at the start, `utf-16-le` or `-be` if it reads so; else empty."""
    start = start[: 1 << 16]
    if start.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "utf-32"
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    # Text of other encodings has a NUL by mistake alone; English in UTF-16 is valid UTF-8 too, every other byte a NUL.
    if b"\0" in start and (4 * start.count(0) > len(start) or not _decodes(start.rpartition(b"\n")[0], "utf-8")):
        for name in ("utf-16-le", "utf-16-be"):
            text = start[: len(start) // 2 * 2].decode(name, "replace")
            known = sum(a.isascii() and (a.isprintable() or a in "\t\r\n") for a in text) + count_han(text)[1]
            if 2 * known > len(text):  # In the other byte order hardly any character is one of these.
                return name
    return ""


def likely_encoding(sample: bytes) -> str:
    """The encoding that some lines are probably in, one of CANDIDATES or `cp1252`; empty where none fits."""
    lines = [line for line in sample.split(b"\n") if not line.isascii()]
    for name in CANDIDATES:
        texts = [line.decode(name) for line in lines if _decodes(line, name)]
        if not lines or len(lines) - len(texts) > MOST_BAD * len(lines):
            continue
        han, common = count_han("".join(texts))
        if name == "utf-8" or (han and common >= LEAST_COMMON * han):
            return name
    # Nearly any bytes are valid here, but the languages that it is for write few letters beyond ASCII.
    high = sum(byte >= 0x80 for line in lines for byte in line)
    western = lines and 5 * high <= sum(map(len, lines)) and all(_decodes(line, "cp1252") for line in lines)
    return "cp1252" if western else ""


def encoding_of(path: str | Path, offset: int = 0) -> str:
    """The encoding that a file is probably in, by what stands from the byte `offset` on; empty where none fits."""
    if not Path(path).is_file():  # A pipe can't be read again.
        return ""
    with open(path, "rb") as stream:
        if found := utf_16(stream.read(SAMPLE)):
            return found
        stream.seek(offset)
        sample = stream.read(SAMPLE)
    return likely_encoding(sample.rpartition(b"\n")[0] or sample)


def how_to_convert(path: str | Path, encoding: str) -> str:
    """The command that makes UTF-8 of a file."""
    known_as = encoding.upper().replace("16-", "16")  # UTF-16LE, but BIG5-HKSCS.
    return f"iconv -f {known_as} -t UTF-8 {shlex.quote(str(path))} > NEW"


def _decodes(raw: bytes, encoding: str) -> bool:
    try:
        raw.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


class Plausibility:
    """Judges decoded text in stretches of STRETCH Han characters, so that a foreign part shows wherever it stands."""

    STRETCH = 1000

    def __init__(self) -> None:
        self.first, self.offset = 1, 0
        """Line and byte at which the stretch begins."""
        self._han = self._common = 0

    def add(self, text: str, number: int, offset: int) -> float | None:
        """Takes line `number`; the share of common characters where a stretch ends with it that is no text."""
        if not self._han:
            self.first, self.offset = number, offset
        han, common = count_han(text)
        self._han, self._common = self._han + han, self._common + common
        return self.judge() if self._han >= self.STRETCH else None

    def judge(self) -> float | None:
        """The same of what has been taken since the last stretch."""
        han, common, self._han, self._common = self._han, self._common, 0, 0
        return None if is_plausible(han, common) else common / han
