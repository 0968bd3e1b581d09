"""A function over many chunks on all cores: results in order, a bounded number of chunks in memory."""

import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from nmt.errors import DataError

T = TypeVar("T")
R = TypeVar("R")

SMALL = 12_000_000
"""Bytes of input below which starting other processes costs more than they save."""


def worker_count(size: int, workers: int | None) -> int:
    """How many processes an input of `size` bytes is worth: one for a small one, else one for each core."""
    if workers is not None:
        return max(1, workers)
    return (
        1 if size < SMALL else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )


def in_order(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """`map(function, items)`, computed by `workers` processes."""
    if workers == 1:
        yield from map(function, items)
        return
    # spawn: a fork of a process with running threads (torch, OpenMP) may hang.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting: deque[Future[R]] = deque()
        source = iter(items)
        try:
            for item in itertools.islice(source, 2 * workers):
                waiting.append(pool.submit(function, item))
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(function, item) for item in itertools.islice(source, 1))
                yield result
        except BrokenProcessPool as error:
            raise DataError(
                "a cleaning process died, most likely for want of memory; close other programs and run it again."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
