"""A function over many chunks on all cores: results in order, a bounded number of chunks in memory."""

import itertools
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from nmt.distributed.launcher import cores
from nmt.errors import DataError

T = TypeVar("T")
R = TypeVar("R")

SMALL = 12_000_000
"""Bytes of input below which starting other processes costs more than they save."""


def worker_count(size: int, workers: int | None = None) -> int:
    """How many processes an input of `size` bytes is worth: one for a small one, else one for each core."""
    if workers is not None:
        return max(1, workers)
    return 1 if size < SMALL else cores()


def _leave_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer, once.


class Workers:
    """Processes to be mapped over, closed at the end of a `with`; one means this process itself."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        if self._count > 1:
            # spawn: a fork of a process with running threads (torch, OpenMP) may hang.
            self._pool = ProcessPoolExecutor(self._count, multiprocessing.get_context("spawn"), _leave_interrupts)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """`function` of each item, in order; at most two items for each process wait in memory."""
        if not self._pool:
            yield from map(function, items)
            return
        source, waiting = iter(items), deque[Future[R]]()
        try:
            for item in itertools.islice(source, 2 * self._count):
                waiting.append(self._pool.submit(function, item))
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(self._pool.submit(function, item) for item in itertools.islice(source, 1))
                yield result
        except BrokenProcessPool as error:
            raise DataError(
                "a cleaning process died, most likely for want of memory; close other programs and run it again."
            ) from error
