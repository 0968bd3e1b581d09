"""The machine and the software that a training would run on, as far as they decide how it goes."""

import logging
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from nmt.distributed.launcher import cores
from nmt.io import installed_version

log = logging.getLogger(__name__)

PACKAGES = ("nmt", "torch", "sentencepiece", "sacrebleu", "safetensors", "numpy")
CPU_INFO = Path("/proc/cpuinfo")
"""Where Linux lists what the CPU can do."""
FAST_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")
"""What Linux calls instructions that multiply bfloat16 faster than float32: two of x86, one of ARM."""
FAST_FLOAT16 = ("amx_fp16", "avx512_fp16", "asimdhp")
"""The same for float16."""
SHARED_MEMORY = Path("/dev/shm")
"""What processes of one machine exchange large things through; containers often give it 64 MiB."""


def describe(device: torch.device) -> dict[str, Any]:
    """Everything by name, sizes in bytes; `device` is the one that would be trained on."""
    return {
        "versions": {"python": platform.python_version()} | {name: installed_version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "bfloat16": fast_bfloat16(CPU_INFO),
        "memory": _memory(),
        "devices": gpus(),
        "backends": backends(),
        "disk_free": shutil.disk_usage(Path()).free,
        "shared_memory": _sizes(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        "device": str(device),
        "exact": exact(device.type),
    }


def exact(device_type: str) -> dict[str, Any]:
    """Whether resuming is expected to be bit-exact, and why."""
    if device_type == "cpu":
        return {"expected": True, "why": "on a CPU, with the same numbers of processes and threads"}
    return {"expected": False, "why": f"some sums of {device_type} are taken in another order each time"}


def fast_bfloat16(cpu: Path) -> str | None:
    """The CPU's instructions for products of bfloat16, by a file like /proc/cpuinfo; None: none, or nobody knows."""
    return next((name for name in FAST_BFLOAT16 if name in _words(cpu)), None)


def warn_of_slow(setting: str, precision: str, device: torch.device) -> None:
    """Log a warning if a CPU is asked for a half precision that it is known to have no instructions for."""
    fast = {"bfloat16": FAST_BFLOAT16, "float16": FAST_FLOAT16}.get(precision, ())
    words = _words(CPU_INFO)
    if device.type == "cpu" and fast and words and not words & {*fast}:
        log.warning(
            "%s is %s, for which this CPU has no instructions: about 20 times slower than float32 on such CPUs. "
            "Stop this and set %s=float32, unless it is meant.",
            *(setting, precision, setting),
        )


def _words(cpu: Path) -> set[str]:
    """What stands in a file like /proc/cpuinfo; nothing where there is none."""
    try:
        return set(cpu.read_text().split())
    except OSError:
        return set()


def gpus() -> list[dict[str, Any]]:
    """Name and bytes of memory of each GPU that torch sees."""
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory": gpu.total_memory} for gpu in found]


def backends() -> dict[str, bool]:
    """Through what the processes of a training can talk: gloo on CPUs, nccl on GPUs."""
    # nmt.distributed.world is the door to this module; what a build of torch has can be asked from outside.
    talk = torch.distributed
    there = talk.is_available()
    return {"gloo": there and talk.is_gloo_available(), "nccl": there and talk.is_nccl_available()}


def lines(facts: dict[str, Any]) -> list[str]:
    """The facts for people."""
    versions, memory, shared, how = facts["versions"], facts["memory"], facts["shared_memory"], facts["exact"]
    devices = [f"{gpu['name']}, {_gib(gpu['memory'])}" for gpu in facts["devices"]]
    rows = {
        "versions": ", ".join(f"{name} {version or 'unknown'}" for name, version in versions.items()),
        "platform": facts["platform"],
        "cores": f"{facts['cores']} that this process may use, {facts['threads']} threads",
        "bfloat16": f"fast on this CPU ({facts['bfloat16']})"
        if facts["bfloat16"]
        else "not known to be faster on this CPU",
        "memory": f"{_gib(memory['total'])}, {_gib(memory['available'])} available",
        "GPUs": "; ".join(devices) or "none",
        "backends": ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in facts["backends"].items()),
        "disk": f"{_gib(facts['disk_free'])} free in {Path().resolve()}",
        "/dev/shm": f"{_gib(shared['total'])}, {_gib(shared['free'])} free" if shared else "none",
        "device": facts["device"],
        "resuming": f"{'exact' if how['expected'] else 'perhaps not exact'}: {how['why']}",
    }
    return [f"{name:<10} {value}" for name, value in rows.items()]


def _memory() -> dict[str, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (page * os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    try:
        # What Linux would give back at once counts as available too.
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return {"total": total, "available": int(found[1]) * 1024 if found else free}


def _sizes(path: Path) -> dict[str, int]:
    usage = shutil.disk_usage(path)
    return {"total": usage.total, "free": usage.free}


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
