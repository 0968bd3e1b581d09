"""Errors that a user can correct: the command line prints their text and exits with `exit_code`."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_TOLD = 100
"""Problems of one refusal that are told in words; further ones are counted."""
LONGEST_TOLD = 600
"""Characters of a problem that are shown; of a longer one the start and the end, where the advice stands."""


class NmtError(Exception):
    """Something failed; the message says what, where and what next."""

    exit_code = 1


class ConfigError(NmtError):
    """A setting or an option is wrong; nothing was read or written. `problems` has a line for each fault."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        told = [
            text if len(text) <= LONGEST_TOLD else f"{text[: LONGEST_TOLD // 2]} ... {text[-LONGEST_TOLD // 3 :]}"
            for text in problems[:MOST_TOLD]
        ]
        more = [f"and {len(problems) - MOST_TOLD:,} more."] if len(problems) > MOST_TOLD else []
        super().__init__("\n".join([*told, *more]))
        self.problems = problems


class DataError(NmtError):
    """A corpus, a text file or an encoded data set is not what it should be."""


class CheckpointError(NmtError):
    """A checkpoint or a run folder cannot be used."""


class Preempted(NmtError):
    """A training was asked to end by a signal, and has saved; the exit code is the usual one of that signal."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal


class LostContact(NmtError):
    """Another process of this training is gone or has failed, and says why; this one is well."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 line`, `2,000 lines`: a number with its noun, whose plural has an s unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


# ── what went wrong with a file ───────────────────────────────────────────────────────────────────────────────────────

STDOUT = "standard output"
"""In place of a path."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Name `path` in a failure of the system that doesn't say where it was: that of a write never does."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def describe_error(error: OSError, path: str | Path | None = None) -> str:
    """`PATH: what went wrong`, and how many bytes are free where that may be the reason; no full stop."""
    where = path or error.filename
    if where == STDOUT:
        return f"{STDOUT}: {'it is closed' if error.errno == errno.EBADF else error.strerror or error}"
    text = (f"{where}: " if where else "") + (error.strerror or str(error))
    return f"{text}; {free_bytes(where):,} bytes are free there" if where and error.errno in _FULL else text


def free_bytes(path: str | Path) -> int:
    """The room on the disk that `path` is or would be on."""
    there = next(folder for folder in (Path(path).absolute(), *Path(path).absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free


def first_line(error: BaseException) -> str:
    """What an error says, without the stack that torch's have after it."""
    return str(error).split("\n", 1)[0]
