"""Run a piece of a test in a child process: to kill it, to give it a small disk, to take its rights away.

A fork of a process that has imported torch costs milliseconds, a new interpreter seconds.
"""

import ctypes
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Ended(NamedTuple):
    """How a child ended: its exit code, or minus the signal that killed it; and what it said on stderr."""

    code: int
    told: str


def forked(
    action: Callable[[], object],
    *,
    largest_file: int | None = None,
    folder: Path | None = None,
    seconds: int = 600,
) -> Ended:
    """Call `action` in a child, which may write files of `largest_file` bytes at most."""
    reading, writing = os.pipe()  # Not a file, which would have `largest_file` bytes at most as well.
    child = _start(action, writing, largest_file, folder, seconds)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as stream:
        told = stream.read()
    return Ended(_code(child), told)


def forked_world(size: int, action: Callable[[int], object], seconds: int = 120) -> list[Ended]:
    """Call `action(rank)` in so many children, which can find each other as those of torchrun do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(size)}

    def at(rank: int) -> None:
        os.environ |= world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        action(rank)

    files = [tempfile.TemporaryFile() for _ in range(size)]  # noqa: SIM115  Not pipes, which may fill.
    children = [_start(lambda rank=rank: at(rank), files[rank].fileno(), None, None, seconds) for rank in range(size)]
    codes = [_code(child) for child in children]
    for file in files:
        file.seek(0)
    told = [file.read().decode("utf-8", errors="replace") for file in files]
    return [Ended(code, text) for code, text in zip(codes, told, strict=True)]


def _code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _start(action: Callable[[], object], told: int, largest_file: int | None, folder: Path | None, seconds: int) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(told, 2)
            sys.stdin, sys.stdout, sys.stderr = (
                os.fdopen(number, mode, encoding="utf-8", closefd=False)
                for number, mode in ((0, "r"), (1, "w"), (2, "w"))
            )
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)  # Guards against a hang alone.
            if folder is not None:
                os.chdir(folder)
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
            action()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)
    return child


def nmt(folder: Path, *words: str, largest_file: int | None = None, bound_by_modes: bool = False) -> Ended:
    """`nmt WORDS` in `folder`, as in a process of its own."""

    def command() -> None:
        from nmt.cli import main

        if bound_by_modes:
            give_up_privileges()
        sys.argv = ["nmt", *words]
        main()

    return forked(command, largest_file=largest_file, folder=folder)


def give_up_privileges() -> None:
    """Let the modes of files and folders bind us as they bind their owner, also if we are root (capset(2), Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    version_3_of_this_process, none = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6)
    if libc.capset(version_3_of_this_process, none):
        raise OSError(ctypes.get_errno(), "capset")
