"""A thread that is ahead: the same items in the same order, and no thread that outlives its block."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.data.prefetch import Prefetch


def until(holds) -> None:
    """Wait until this holds; the deadline only guards against a hang."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


@given(st.integers(0, 40), st.integers(1, 7), st.integers(0, 40))
def test_items_come_in_their_order_each_once_and_no_thread_is_left(count, depth, taken):
    before = threading.active_count()
    with Prefetch(iter(range(count)), depth) as items:
        found = [item for item, _ in zip(items, range(taken), strict=False)]
        if taken > count:
            assert list(items) == [], "what has ended stays at its end"
    assert found == list(range(min(count, taken)))
    assert threading.active_count() == before


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_at_most_depth_items_are_made_ahead_and_then_no_thread_runs(depth):
    made, before = [], threading.active_count()

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    with Prefetch(items(), depth) as found:
        assert threading.active_count() == before
        assert made == [], "nothing before something is asked for"
        for number in range(50):
            assert next(found) == number
            until(lambda: threading.active_count() == before)
            assert number + 1 + depth // 2 < len(made) <= number + 1 + depth
    assert len(made) <= 50 + depth


def test_the_next_item_is_made_while_the_last_one_is_looked_at():
    begun = threading.Event()

    def items() -> Iterator[int]:
        yield 0
        begun.set()
        yield 1

    with Prefetch(items(), 1) as found:
        assert next(found) == 0
        assert begun.wait(60)


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt(), SystemExit(3), MemoryError()])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_error_is_raised_where_its_item_would_have_been(error, after):
    def items() -> Iterator[int]:
        yield from range(after)
        raise error

    before, found = threading.active_count(), []

    def take() -> None:
        with Prefetch(items(), 3) as ahead:
            for item in ahead:
                found.append(item)

    with pytest.raises(type(error)) as raised:
        take()
    assert raised.value is error
    assert found == list(range(after))
    assert threading.active_count() == before


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, None])
def test_whoever_stops_early_or_is_interrupted_leaves_no_thread_and_a_closed_iterator(number, nested):
    closed, before = [], threading.active_count()

    def items() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            closed.append("inner")

    def doubled() -> Iterator[int]:
        with Prefetch(items(), 2) as ahead:
            try:
                for item in ahead:
                    yield 2 * item
            finally:
                closed.append("outer")

    def take_five() -> None:
        with Prefetch(doubled() if nested else items(), 3) as ahead:
            for _ in zip(range(5), ahead, strict=False):
                pass
            if number is not None:
                os.kill(os.getpid(), number)
            raise ZeroDivisionError

    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
            take_five()
    finally:
        signal.signal(signal.SIGINT, kept)
    assert closed == (["outer", "inner"] if nested else ["inner"])
    assert threading.active_count() == before


def test_an_item_that_is_waited_for_is_interrupted_by_a_signal():
    free = threading.Event()

    def items() -> Iterator[int]:
        free.wait(60)
        yield 1

    def interrupt(number, frame):
        free.set()
        raise InterruptedError

    kept = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError), Prefetch(items(), 1) as ahead:
            next(ahead)
    finally:
        signal.signal(signal.SIGALRM, kept)
    assert free.is_set()


def test_the_time_that_an_item_was_waited_for_is_measured():
    go_on = threading.Event()

    def items() -> Iterator[int]:
        yield 0
        go_on.wait(60)
        yield 1

    with Prefetch(items(), 4) as ahead:
        next(ahead)
        threading.Timer(0.2, go_on.set).start()
        next(ahead)
        assert ahead.waited > 0.1
