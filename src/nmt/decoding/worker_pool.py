"""Work on a CPU shared by processes of one thread each: twice as fast as one process with as many threads.

The processes are forked, so that they begin at once, with the model and the work as they are in memory. They are told
the number of a task and answer in JSON, through a pipe each. Where forking isn't safe there is one process, this one.
"""

import json
import logging
import multiprocessing
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch
from tqdm import TMonitor

from nmt import errors
from nmt.distributed.launcher import cores, die_with_parent
from nmt.distributed.world import is_launched
from nmt.errors import NmtError

log = logging.getLogger(__name__)


def most_processes() -> int:
    """How many processes may share this one's work: one for each thread that torch has, at most one for each core.

    One if others share the machine already (a launched training, a pool of processes).
    """
    if sys.platform != "linux" or not _is_alone():
        return 1
    if is_launched() or multiprocessing.parent_process() is not None:
        return 1
    return min(torch.get_num_threads(), cores())


def _is_alone() -> bool:
    """Whether the main thread is Python's only one, but for the progress bar's, which only sleeps.

    Any other may compute, and so hold a lock of torch's at the fork. In the copy nobody would open it, and the first
    product of two matrices would wait for ever.
    """
    main = threading.main_thread()
    others = [thread for thread in threading.enumerate() if thread is not main and not isinstance(thread, TMonitor)]
    return threading.current_thread() is main and not others


def share_out(tasks: int, work: Callable[[int], Any], processes: int) -> Iterator[tuple[int, Any]]:
    """Each task's number and what `work` gives for it, as they get done; a tuple comes back as a list.

    Where the system allows no more processes, those that there are do the work, or this one. What `work` raises is
    raised here: an NmtError as it is, anything else with the process's traceback. Raises NmtError if a process is
    killed. No process outlives this generator, or the process that it runs in.
    """
    waiting = iter(range(tasks))
    workers: dict[Connection, ForkProcess] = {}
    try:
        try:
            for _ in range(processes):
                _start(workers, work)
        except OSError as error:
            log.warning("cannot start another process (%s); the work is done by %d", error.strerror, len(workers) or 1)
        if not workers:
            yield from ((task, work(task)) for task in waiting)
        busy = [worker for worker in workers if _order(worker, waiting)]
        while busy:
            for worker in wait(busy):
                assert isinstance(worker, Connection)
                try:
                    task, value, problem = json.loads(worker.recv_bytes())
                except (EOFError, OSError):
                    raise _lost(workers[worker], len(workers)) from None
                if problem:
                    raise _as_raised(*problem)
                if not _order(worker, waiting):
                    busy.remove(worker)
                yield task, value
    finally:
        for worker, process in workers.items():
            process.kill()
            process.join()
            worker.close()


def _start(workers: dict[Connection, ForkProcess], work: Callable[[int], Any]) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, [*workers, here], work), daemon=True)
    with there, warnings.catch_warnings():
        # From 3.12 on Python warns of any thread, those that only wait among them: torch's and the progress bar's.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    workers[here] = process


def _order(worker: Connection, waiting: Iterator[int]) -> bool:
    """Give a worker the next task; False if there is none."""
    task = next(waiting, None)
    if task is not None:
        try:
            worker.send_bytes(json.dumps(task).encode())
        except OSError:
            return True  # It is gone, which shows when its answer is waited for.
    return task is not None


def _serve(orders: Connection, of_others: Sequence[Connection], work: Callable[[int], Any]) -> None:
    """The loop of a worker: answer requests until the pipe is closed."""
    # First of all: torch would wait for ever for the threads that it had before the fork, which copies only this one.
    torch.set_num_threads(1)
    die_with_parent()
    # Who began it ends it: Ctrl-C and a scheduler's SIGTERM go to all processes, and a training saves before it ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for connection in of_others:
        connection.close()  # Else they would stay open when the process at their other end is gone.
    while True:
        try:
            task = json.loads(orders.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = [task, work(task), None]
        except Exception as error:
            answer = [task, None, [type(error).__name__, str(error), traceback.format_exc()]]
        orders.send_bytes(json.dumps(answer).encode())


def _as_raised(kind: str, text: str, trace: str) -> Exception:
    """The error that a worker met."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, NmtError):
        return known(text)
    error = MemoryError(text) if kind == "MemoryError" else RuntimeError(text if kind == "RuntimeError" else trace)
    error.add_note(f"In one of the processes that share the work:\n{trace}")
    return error


def _lost(process: ForkProcess, count: int) -> NmtError:
    process.join(1)
    code = process.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
    return NmtError(
        f"process {process.pid}, one of {count} that share the work, {how}. Where memory is short, Linux ends one: a "
        "lower translate.batch_tokens needs less, and so does OMP_NUM_THREADS=1, which does the work in one process."
    )
