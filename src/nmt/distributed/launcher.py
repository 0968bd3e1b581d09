"""`--processes N`: N processes of this machine that train together, as torchrun would start them, without its agent.

They find each other by torchrun's environment variables. This process passes signals on, ends the rest when one of
them fails, says last which one it was and why, and leaves with that one's exit code.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

GRACE = 10.0
"""Seconds that the rest have, after one process failed, to notice it and to write down what they must."""

AGAIN = 5.0
"""Seconds after a signal in which another one is the same wish to end, told twice; a later one means: at once."""

LEAST, MOST = 256, 8
"""Tokens of an update, on either side, for which another process pays; processes beyond which memory would not."""

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of computing that a container has (`docker run --cpus`), and of the time in which it has them."""

GPUS = ("nvidia[0-9]*", "nvhost-gpu", "dxg", "kfd")
"""What a GPU is called in /dev: NVIDIA's, on a Jetson and in WSL; AMD's."""


def cores() -> int:
    """Cores that this process may use, but not more than a container's share of their time is worth."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):  # There is no quota: no such file, or `max` for the first number.
        return allowed
    return max(1, min(allowed, round(quota / period)))


def processes_for(device: str, batch_tokens: int) -> int:
    """One process a core on a CPU, where one thread each is faster than many threads in one; else one process.

    Each holds the whole model, so cores beyond MOST become threads. Known without torch, which takes seconds to load.
    Who sets OMP_NUM_THREADS wants threads, and gets one process; what a launcher started is one of its processes.
    """
    told = "OMP_NUM_THREADS" in os.environ or "WORLD_SIZE" in os.environ
    return 1 if told or not is_cpu(device) else max(1, min(cores(), MOST, batch_tokens // LEAST))


def is_cpu(device: str) -> bool:
    """Whether a training with this `--device` runs on a CPU, as far as that is known without torch."""
    return device == "cpu" or (device == "auto" and sys.platform != "darwin" and not has_gpu(Path("/dev")))


def has_gpu(devices: Path) -> bool:
    """Whether a folder like /dev names a GPU, of whatever maker."""
    return any(True for name in GPUS for _ in devices.glob(name))


def family(pid: int) -> list[int]:
    """The process and all that it and its children have started, parents first."""
    found = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [one for child in tasks.read_text().split() for one in family(int(child))]
    return found


def is_main() -> bool:
    """Whether this process is rank 0 or the only one, by its environment; does not import torch."""
    return os.environ.get("RANK", "0") == "0"


def launch(arguments: Sequence[str], processes: int) -> int:
    """Start `python ARGUMENTS` so many times and wait; returns 0, or the exit code of the first that failed.

    On a CPU each gets its share of the cores as threads.
    """
    # Of a torchrun around this process nothing is passed on: it would make them look for its store, not for their own.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    environment = inherited | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    workers: list[subprocess.Popen[bytes]] = []
    asked: list[float] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(time.monotonic())
        for worker in workers:
            worker.send_signal(number)

    # Not by the terminal as well: a worker that gets Ctrl-C twice ends without saving. So each has its own session.
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    with tempfile.TemporaryDirectory(prefix="nmt-") as folder:
        try:
            for rank in range(processes):
                errors = Path(folder, f"{rank}.json")
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(errors)}
                command = [sys.executable, *arguments]
                workers.append(
                    subprocess.Popen(command, env=environment | own, start_new_session=True, preexec_fn=die_with_parent)
                )
            return _wait(workers, Path(folder), asked)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            for number, handler in before.items():
                signal.signal(number, handler)


def _wait(workers: Sequence["subprocess.Popen[bytes]"], folder: Path, asked: Sequence[float]) -> int:
    """Wait for all; when one fails, or was asked to end at once, the rest may take GRACE seconds more.

    `asked` has the moments of the signals that were passed on.
    """
    failed: dict[int, float] = {}
    until = float("inf")  # Of the clock that can't be set back.
    while any(worker.poll() is None for worker in workers):
        for rank, worker in enumerate(workers):
            if worker.poll() and rank not in failed:
                failed[rank] = time.time()
                # Settings are refused before the processes know of each other: nobody has anything to write down.
                until = min(until, time.monotonic() + (0 if worker.poll() == 2 else GRACE))
        if asked and asked[-1] - asked[0] > AGAIN:
            until = min(until, asked[-1] + GRACE)
        if time.monotonic() > until:
            for worker in workers:
                worker.kill()
        time.sleep(0.05)
    failed |= {rank: time.time() for rank, worker in enumerate(workers) if worker.poll() and rank not in failed}
    if not failed:
        return 0
    # One that fails because another is gone may be seen first; what they have written themselves knows better.
    words = {rank: _word(folder / f"{rank}.json") for rank in failed}
    first = min(failed, key=lambda rank: words[rank][0] or failed[rank])
    code = workers[first].returncode
    if words[first][1]:
        print(words[first][1], file=sys.stderr)
    elif code < 0:
        print(f"process {first} of {len(workers)} was ended by {signal.Signals(-code).name}.", file=sys.stderr)
    return code if code > 0 else 128 - code


def _word(path: Path) -> tuple[float, str]:
    """When a process failed and what it said about it; zero and nothing if it said nothing."""
    try:
        message = json.loads(path.read_bytes())["message"]
        return float(message["extraInfo"]["seconds"]), str(message["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0, ""


def write_error_file(text: str, *, is_consequence: bool = False) -> None:
    """Write why this process fails to the error file that torchrun's agent and `launch` read.

    The earliest word is taken for the cause; a consequence, such as a lost connection, is dated later than it is.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        now = time.time() + (60 if is_consequence else 0)
        extra = {"py_callstack": text, "timestamp": str(int(now)), "seconds": now}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> None:
    """Linux ends this process when the one that started it is gone, even if that was killed with -9."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        return
