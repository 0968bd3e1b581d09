"""Work that forked processes share: what comes back, in which cases none is started, and how each of them can end."""

import errno
import io
import itertools
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from forked import forked
from nmt.decoding import worker_pool
from nmt.decoding.options import Counts, Options
from nmt.decoding.worker_pool import most_processes, share_out
from nmt.errors import DataError, NmtError
from test_translation import ENGLISH, make, tokenizer, words  # noqa: F401


def children():
    """The processes that this one has started and that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after_name[1]) == os.getpid():
            found.append(int(path.parent.name))
    return found


@pytest.fixture(autouse=True)
def nobody_is_left():
    before = set(children())
    yield
    assert set(children()) <= before


@pytest.fixture
def two(monkeypatch):
    """As on a machine of two cores; here torch has one thread, so that nothing is shared unless a test wants it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("nmt.distributed.launcher.QUOTA", Path("/none"))
    runner, alive = set(threading.enumerate()) - {threading.main_thread()}, threading.enumerate
    monkeypatch.setattr(threading, "enumerate", lambda: [one for one in alive() if one not in runner])
    for variable in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def started(monkeypatch):
    """The numbers of processes that were started, each time that work was shared."""
    counts, start = [], worker_pool._start

    def count(so_far, work):
        start(so_far, work)
        counts.append(len(so_far))

    monkeypatch.setattr(worker_pool, "_start", count)
    return counts


# ── translations ────────────────────────────────────────────────────────────────────────────────────────────────────

WISHES = {
    "plain": {},
    "n_best": {"options": Options(n_best=3)},
    "sample": {"options": Options(sample=True, n_best=2, seed=5, top_k=20)},
    "prefixes": {"prefixes": ["我", "", "猫坐在"] * 15},
    "windows": {"window": 20},
}


@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
def test_two_processes_give_what_one_gives(tokenizer, two, started, monkeypatch, wish):  # noqa: F811
    lines = [*words(38), "", "one. Two! Three? " * 8, *ENGLISH]
    translator = make(tokenizer, dtype=torch.float32, max_source_tokens=30, beam=3, batch_tokens=200)

    def told():
        counts, done = Counts(), []
        found = list(translator.stream(lines, counts=counts, progress=done.append, **wish))
        return found, counts, sum(done)

    shared = told()
    assert started[:2] == [1, 2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    started.clear()
    assert told() == shared
    assert started == []
    assert shared[1].split == 1


def test_one_batch_stays_in_this_process(tokenizer, two, started):  # noqa: F811
    translator = make(tokenizer)
    assert translator.translate(ENGLISH[:1])[0]
    for _ in translator.stream(ENGLISH, window=1):
        pass
    assert started == []


def test_a_model_of_nan_is_told_as_in_one_process(tokenizer, two, started):  # noqa: F811
    translator = make(tokenizer, dtype=torch.float32, batch_tokens=60, tied=True)
    with torch.no_grad():
        translator.model.embedding.weight.fill_(float("nan"))
    with pytest.raises(NmtError, match="NaN"):
        translator.translate(ENGLISH)
    assert started


def test_a_fork_is_safe_after_torch_has_worked_with_several_threads(tokenizer, two):  # noqa: F811
    """Without its first line `_serve` would wait for ever here."""

    def work():
        torch.set_num_threads(2)
        x = torch.randn(300, 300, requires_grad=True)
        (x @ x).softmax(1).sum().backward()
        translator = make(tokenizer, dtype=torch.float32, batch_tokens=60)
        assert len(translator.translate(ENGLISH)) == len(ENGLISH)
        assert [value for _, value in sorted(share_out(3, lambda task: float((x @ x).sum() * 0), 2))] == [0.0] * 3

    ended = forked(work, seconds=60)
    assert ended.code == 0, ended.told


# ── who may share ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_there_are_as_many_processes_as_threads_but_not_more_than_cores(two, monkeypatch):
    assert most_processes() == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert most_processes() == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert most_processes() == 1


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_nothing_is_forked_elsewhere_than_on_linux(two, monkeypatch, system):
    monkeypatch.setattr("sys.platform", system)
    assert most_processes() == 1


def test_no_process_of_several_starts_more(two, monkeypatch):
    assert [count for _, count in share_out(1, lambda task: most_processes(), 1)] == [1]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert most_processes() == 1


def test_nothing_is_forked_where_another_thread_may_compute(two):
    """Such a fork hangs as soon as the thread holds a lock of oneDNN's: with two that multiply, in one of five."""
    found, ended = [], threading.Event()
    thread = threading.Thread(target=lambda: (found.append(most_processes()), ended.wait()))
    thread.start()
    assert most_processes() == 1
    ended.set()
    thread.join()
    assert found == [1]
    with tqdm(total=1, file=io.StringIO()):
        assert most_processes() == 2


# ── how work and processes end ──────────────────────────────────────────────────────────────────────────────────────


def test_every_task_is_done_once_and_by_more_than_one_process():
    def work(task):
        time.sleep(0.02)
        return [task**2, os.getpid(), torch.get_num_threads(), 0.1 + 0.2]

    found = dict(share_out(12, work, 3))
    assert [found[task][0] for task in range(12)] == [task**2 for task in range(12)]
    assert len({pid for _, pid, *_ in found.values()} - {os.getpid()}) == 3
    assert {tuple(rest) for _, _, *rest in found.values()} == {(1, 0.1 + 0.2)}
    assert list(share_out(0, work, 2)) == []


@pytest.mark.parametrize("most", [0, 1])
def test_where_no_more_processes_may_start_those_that_there_are_do_the_work(most, monkeypatch, caplog):
    fork, started = os.fork, itertools.count()

    def limited():
        if next(started) >= most:
            raise BlockingIOError(errno.EAGAIN, "no more")
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    found = dict(share_out(5, lambda task: [task**2, os.getpid()], 3))
    assert [found[task][0] for task in range(5)] == [task**2 for task in range(5)]
    pids = {pid for _, pid in found.values()}
    assert len(pids) == 1
    assert (pids == {os.getpid()}) == (most == 0)
    assert "(no more); the work is done by 1" in caplog.text


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (DataError("the line is bad."), DataError, r"^the line is bad\.$"),
        (MemoryError("no room"), MemoryError, "(?m)^no room$"),
        (RuntimeError("can't allocate memory"), RuntimeError, "(?m)^can't allocate memory$"),
        (KeyError("lost"), RuntimeError, r"(?s)in fail.*KeyError: 'lost'"),
    ],
)
def test_what_goes_wrong_in_a_process_is_raised_here(error, kind, text):
    with pytest.raises(kind, match=text):
        list(share_out(4, lambda task: fail(error) if task == 2 else task, 2))


@pytest.mark.parametrize(("end", "text"), [(lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL"),
                                           (lambda: os._exit(7), "ended with code 7")])  # fmt: skip
def test_a_process_that_is_killed_is_told_and_the_others_end(end, text):
    begun = time.monotonic()
    with pytest.raises(NmtError, match=f"one of 2 that share the work, {text}"):
        list(share_out(4, lambda task: end() if task == 1 else time.sleep(30 if task else 0), 2))
    assert time.monotonic() - begun < 10


def test_processes_end_when_nobody_wants_the_rest():
    results = share_out(100, lambda task: task, 2)
    next(results)
    assert len(multiprocessing.active_children()) == 2
    results.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_one_that_is_interrupted_or_killed(tmp_path, number):
    def work(task):
        (tmp_path / str(os.getpid())).touch()
        time.sleep(30)

    def share():
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def end():
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), number)

        threading.Thread(target=end, daemon=True).start()
        list(share_out(4, work, 2))

    ended = forked(share, seconds=60)
    assert ended.code == (1 if number == signal.SIGINT else -signal.SIGKILL), ended.told
    pids = [int(path.name) for path in tmp_path.iterdir()]
    until = time.monotonic() + 5
    while time.monotonic() < until and any(is_there(pid) for pid in pids):
        time.sleep(0.01)
    assert len(pids) == 2
    assert not any(is_there(pid) for pid in pids)


def is_there(pid):
    """Whether a process runs: one that has ended may still wait for its parent to read its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_signal_to_all_leaves_the_work_to_who_began_it():
    def work(task):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        return task

    assert sorted(share_out(4, work, 2)) == [(task, task) for task in range(4)]
