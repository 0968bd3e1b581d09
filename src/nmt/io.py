"""The one reader and writer of text lines: bytes -> UTF-8 -> split at LF, and nowhere else.

`str.splitlines`, universal newlines and `codecs` readers also split at U+2028, U+0085, VT, FF or a lone CR, and then
two files no longer match line by line. Here one CR before the LF is taken off, a byte order mark is taken off the
first line, and everything else stays.
"""

import contextlib
import hashlib
import io
import json
import os
import sys
import uuid
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from nmt.charset import encoding_of, how_to_convert
from nmt.errors import STDOUT, CheckpointError, DataError, counted, describe_error, writing

DISTRIBUTION = "nmt-pipeline"
"""What this package is called in the package index."""

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
            likely = encoding_of(path)
            advice = (
                f" (it looks like {likely}): {how_to_convert(path, likely)}" if likely not in ("", "utf-8") else "."
            )
            raise DataError(f"{path}, line {number} is not UTF-8; convert the file first{advice}")
    return [text for text, _ in found]


def read_aligned(*paths: str | Path) -> list[tuple[str, ...]]:
    """The rows of files that belong together line by line; raises DataError with the counts when they differ."""
    columns = [read_lines(path) for path in paths]
    if len({len(column) for column in columns}) > 1:
        counts = ", ".join(
            f"{path} has {counted(len(column), 'line')}" for path, column in zip(paths, columns, strict=True)
        )
        raise DataError(f"{counts}; they must match line by line.")
    return list(zip(*columns, strict=True))


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Write each line with an LF, to a temporary name first, so that `path` is never half a file."""
    path = Path(path)
    # A pipe or a device is written to, never replaced by a file; a folder is refused before any work.
    part = path if os.path.exists(path) and not path.is_file() else path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as stream:
            stream.writelines(line.encode() + b"\n" for line in lines)
        if part != path:
            os.replace(part, path)
    except OSError as error:
        raise DataError(f"cannot write {describe_error(error, path)}.") from error
    finally:
        with contextlib.suppress(OSError):
            if part != path:
                part.unlink(missing_ok=True)


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class _Stdout(io.FileIO):
    def write(self, data: Any) -> int:
        with writing(STDOUT):
            return super().write(data)


def use_utf8() -> None:
    """Make stdin, stdout, stderr and the names of files UTF-8 whatever the locale says: Chinese survives LC_ALL=C.

    A failure to write to stdout names it, as that of a file names the file.

    Where names can't be (PYTHONUTF8=0), this process begins anew, since Python settles that when it starts. A stream
    that was closed (`<&-`) is an empty one for input; what is written to it fails as a write, not as a bug.
    """
    try:
        os.fsencode("文")
    except UnicodeEncodeError:
        if os.environ.get("PYTHONUTF8") != "1":
            os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONUTF8": "1"})
    for name, flag in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            # Without a buffer, so that nothing is left to be written when the process ends.
            number, mode = os.open(os.devnull, flag), "rb" if name == "stdin" else "wb"
            raw = _Stdout(number, mode) if name == "stdout" else io.FileIO(number, mode)
            setattr(sys, name, io.TextIOWrapper(raw, write_through=True))
    buffer = getattr(sys.stdout, "buffer", None)
    if type(getattr(buffer, "raw", buffer)) is io.FileIO:  # Else a caller of `main` has put something there.
        named: Any = _Stdout(sys.stdout.fileno(), "wb", closefd=False)
        at_once, lines = isinstance(buffer, io.RawIOBase), bool(sys.stdout.line_buffering)
        sys.stdout = io.TextIOWrapper(
            named if at_once else io.BufferedWriter(named), line_buffering=lines, write_through=at_once
        )
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="replace")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run; raises CheckpointError, without a full stop, where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return found


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_bytes` does."""
    write_bytes(path, (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under a name of its own, then rename, so that several writers at once are harmless."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with writing(path):
            part.write_bytes(content)
            os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None; `nmt` stands for this one, whatever its distribution is called."""
    try:
        return metadata.version(DISTRIBUTION if package == "nmt" else package)
    except metadata.PackageNotFoundError:  # Used from a source tree, or an optional package.
        return None
