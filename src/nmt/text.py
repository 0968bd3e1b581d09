"""The one reader and writer of text lines: bytes -> UTF-8 -> split at LF, and nowhere else.

`str.splitlines`, universal newlines and `codecs` readers also split at U+2028, U+0085, VT, FF or a lone CR, and then
two files no longer match line by line. Here one CR before the LF is taken off, a byte order mark is taken off the
first line, and everything else stays.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from nmt.errors import DataError, told

STANDARD = "-"
"""The file name that means stdin or stdout."""


def decode_line(raw: bytes, *, first: bool, encoding: str = "utf-8") -> tuple[str, bool]:
    """The text of one line as it was read (with or without its LF), and whether every byte could be decoded.

    Bytes that can't be decoded become U+FFFD.
    """
    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    try:
        text, whole = raw.decode(encoding), True
    except UnicodeDecodeError:
        text, whole = raw.decode(encoding, errors="replace"), False
    return (text.removeprefix("\ufeff") if first else text), whole


def lines_of(stream: BinaryIO, encoding: str = "utf-8") -> Iterator[tuple[str, bool]]:
    """Each line of a binary stream as (text, every byte was valid), as soon as it has arrived."""
    for number, raw in enumerate(iter(stream.readline, b"")):
        yield decode_line(raw, first=number == 0, encoding=encoding)


def read_lines(path: str | Path) -> list[str]:
    """All lines of a UTF-8 file; raises DataError where it cannot be read, with the line number of an invalid byte."""
    try:
        with open(path, "rb") as stream:
            found = list(lines_of(stream))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from error
    for number, (_, whole) in enumerate(found, 1):
        if not whole:
            raise DataError(f"{path}, line {number} is not UTF-8; convert the file first (iconv -f GB18030 -t UTF-8).")
    return [text for text, _ in found]


def read_aligned(*paths: str | Path) -> list[tuple[str, ...]]:
    """The rows of files that belong together line by line; raises DataError with the counts when they differ."""
    columns = [read_lines(path) for path in paths]
    if len({len(column) for column in columns}) > 1:
        counts = ", ".join(f"{path} has {len(column):,} lines" for path, column in zip(paths, columns, strict=True))
        raise DataError(f"{counts}; they must match line by line.")
    return list(zip(*columns, strict=True))


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Write each line with an LF, to a temporary name first, so that `path` is never half a file."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as stream:
            stream.writelines(line.encode() + b"\n" for line in lines)
        os.replace(part, path)
    except OSError as error:
        raise DataError(f"cannot write {told(error, path)}.") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def use_utf8_streams() -> None:
    """Make stdin, stdout and stderr UTF-8 whatever the locale says, so that Chinese survives LC_ALL=C."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="replace")
