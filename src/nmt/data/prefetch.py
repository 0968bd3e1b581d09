"""A background thread that prefetches the items of an iterator."""

import queue
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """The items of an iterator in their order, up to `depth` of them made ahead of who takes them. Used as a context.

    What the iterator raises is raised where its item would have been taken. A thread runs only while items are to be
    made, from the first one that is asked for, and none runs after the block: so what forks in a pause finds no thread,
    and nothing waits to be told to end. The iterator is closed with the block, too, if it is a generator.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self.items, self.depth = items, depth
        self.ready: queue.SimpleQueue[tuple[T] | BaseException] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.works = self.stopped = self.over = False
        self.thread: threading.Thread | None = None
        self.waited = 0.0
        """Seconds that the last item was waited for."""

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopped = True
        if self.thread:
            self.thread.join()
        close = getattr(self.items, "close", None)
        if close:
            close()

    def __iter__(self) -> "Prefetch[T]":
        return self

    def __next__(self) -> T:
        if self.over:
            raise StopIteration
        self._refill()
        started = time.perf_counter()
        found = self.ready.get()
        self.waited = time.perf_counter() - started
        if isinstance(found, BaseException):
            self.over = True
            raise found  # StopIteration as well.
        self._refill()
        return found[0]

    def _refill(self) -> None:
        """Start the thread if it has ended and half of the items are taken, so that few items cost a start each."""
        with self.lock:
            if self.works or self.ready.qsize() > self.depth // 2:
                return
            self.works = True
        self.thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while not self.stopped:
            try:
                self.ready.put((next(self.items),))
            except BaseException as error:
                self.ready.put(error)
                return  # `works` stays: there is nothing more to start a thread for.
            # Under the lock, so that whoever takes items sees either this thread at work or enough of them.
            with self.lock:
                if self.ready.qsize() >= self.depth:
                    self.works = False
                    return
