"""Processes that train together: World is handed along as a value, and a world of one is the same object."""

import gc
import json
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.nn.functional  # DDP imports it; imported after the group is made, it keeps that for ever.
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore, _abort_process_group
from torch.distributed.rendezvous import rendezvous

from nmt.distributed.gpu_defaults import Gpu
from nmt.errors import ConfigError, LostContact, NmtError, first_line


@dataclass(frozen=True)
class AsyncWork:
    """An all-reduce that runs while this process continues."""

    value: Tensor
    work: Any

    def wait(self) -> int:
        """Wait for the result and return it."""
        self.work.wait()
        return int(self.value.item())


@dataclass(frozen=True)
class World:
    """The rank of this process, the number of processes, and its device."""

    rank: int
    size: int
    device: torch.device
    control: Any = None
    """The process group of the methods below: always gloo, so that none of them waits for a GPU."""
    local_rank: int = 0
    """Rank among the processes of this machine."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs and writes."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all processes."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor, group=self.control)
        return [float(value) for value in tensor.tolist()]

    def broadcast(self, values: Sequence[float]) -> list[float]:
        """Return the values of rank 0 on all processes."""
        return self.sum(values if self.is_main else [0.0] * len(values))

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors of rank 0 in place."""
        if self.size > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, 0)

    def barrier(self) -> None:
        """Wait for all processes."""
        self.sum([0.0])

    def all_reduce_max(self, value: int) -> AsyncWork:
        """Start an all-reduce of the maximum."""
        tensor = torch.tensor(value)
        work = distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=self.control, async_op=True)
        return AsyncWork(tensor, work)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all processes, by rank."""
        sizes = [int(n) for n in self.sum([float(len(data) if r == self.rank else 0) for r in range(self.size)])]
        if self.size == 1:
            return [data]
        if not any(sizes):
            return [b""] * self.size
        everything = torch.zeros(sum(sizes), dtype=torch.uint8)
        start = sum(sizes[: self.rank])
        everything[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        distributed.all_reduce(everything, group=self.control)
        return [part.numpy().tobytes() for part in torch.split(everything, sizes)]

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """If this block fails on one process, raise on all of them with the reason, so that none waits.

        The process that failed raises its own error, the others LostContact. The block must not communicate.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        text = (
            "" if error is None else str(error) if isinstance(error, NmtError) else f"{type(error).__name__}: {error}"
        )
        failures = {rank: reason.decode() for rank, reason in enumerate(self.gather(text.encode())) if reason}
        if error is not None:
            raise error
        if failures:
            raise LostContact("\n".join(f"process {rank} of {self.size}: {text}" for rank, text in failures.items()))

    def require_equal(self, facts: Mapping[str, str], advice: str) -> None:
        """Raise NmtError on all processes unless these facts are equal on all; it names the rank that differs."""
        theirs: list[dict[str, str]] = [json.loads(data) for data in self.gather(json.dumps(dict(facts)).encode())]
        problems = [
            f"{name} is {values[0]} on process 0, but {value} on process {rank} of {self.size}"
            for name in facts
            for values in [[facts[name] for facts in theirs]]
            for rank, value in enumerate(values)
            if value != values[0]
        ]
        if problems:
            raise NmtError("\n".join([*problems, advice]))


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device `name`; `auto` is a GPU if there is one. Raises ConfigError if it cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: no such device; give auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch sees no GPU here; give cpu, or install a CUDA build of torch.")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise ConfigError(f"--device: there is no GPU {device.index}; torch sees {torch.cuda.device_count()}.")
        torch.cuda.set_device(device)
        # float32 means float32, also where a container's environment turns on TF32, whose products keep 10 bits of 23.
        torch.set_float32_matmul_precision("highest")
    elif device.type != "cpu" and not (device.type == "mps" and torch.backends.mps.is_available()):
        raise ConfigError(f"--device {name}: this machine has none; give auto, cpu, cuda or cuda:N.")
    return device


def has_cuda() -> bool:
    """Whether torch sees a GPU here."""
    return torch.cuda.is_available()


def gpu_of(device: torch.device) -> Gpu | None:
    """What decides the defaults on this device; None if it is no CUDA device."""
    if device.type != "cuda":
        return None
    memory = torch.cuda.get_device_properties(device).total_memory
    return Gpu(memory, torch.cuda.is_bf16_supported(including_emulation=False))


def limit_onednn_cache(device: torch.device, precision: str, count: int) -> None:
    """Let a CPU keep the code of `count` products in half precision, each with its shapes, and not of 1024.

    oneDNN makes it anew for each shape. Few micro-batches have the same shapes, so what is kept for those that never
    come again grows to a gigabyte. Read at the first such product; what the user's environment says stays.
    """
    if device.type == "cpu" and precision != "float32":
        for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(cache, str(count))


def is_launched() -> bool:
    """Whether torchrun, or something with its manners, started this process."""
    return "WORLD_SIZE" in os.environ


@contextmanager
def init_distributed(device: str = "auto", timeout: float = 600.0) -> Iterator[World]:
    """The world of this process: what torchrun's environment says, or one process alone.

    A process waits `timeout` seconds for the others, here and later. Raises ConfigError if the environment is not
    whole, NmtError if the others don't come.
    """
    if not is_launched():
        yield World(0, 1, choose_device(device))
        return
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        where = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT'])}"
    except (KeyError, ValueError) as error:
        raise ConfigError(f"the launcher's environment is not whole ({error}); start with torchrun.") from error
    if not 0 <= rank < size:
        raise ConfigError(f"RANK is {rank}, but WORLD_SIZE is {size}; start with torchrun.")
    chosen = choose_device(device, local_rank)
    patience = timedelta(seconds=timeout)
    lost = f"process {rank} of {size} could not join the others at {where} within {timeout:.0f} s"
    advice = f"Start exactly {size} processes, on a port that is free (torchrun --standalone finds one)."
    try:
        with _deadline(timeout + 10, f"{lost}: whoever listens there does not answer.\n{advice}"):
            backend = "nccl" if chosen.type == "cuda" else "gloo"
            store, *_ = next(rendezvous("env://", rank, size, timeout=patience))
            store = PrefixStore(f"attempt {_attempt()}", store)
            distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
            control = distributed.new_group(backend="gloo", timeout=patience) if backend == "nccl" else None
    except (RuntimeError, ValueError) as error:
        raise NmtError(f"{lost}: {first_line(error)}\n{advice}") from error
    end = distributed.destroy_process_group
    try:
        world = World(rank, size, chosen, control, local_rank)
        yield world
        world.barrier()  # The first process may hold the store, so it does not leave before the others are done.
    except BaseException as error:
        if backend == "nccl":
            end = _abort_process_group  # The other waits for what runs on the GPU, and so for a process that is dead.
        release_frames(error)
        raise
    finally:
        # Ends gloo's threads if nothing else holds the group. One that still ran when the interpreter ends would abort.
        end()


def release_frames(error: BaseException | None) -> None:
    """Forget what the functions held that an error came through, such as the model and the results of its layers."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()


@contextmanager
def _deadline(seconds: float, text: str) -> Iterator[None]:
    """End this process with `text` if the block takes longer.

    torch waits for ever for a store that takes a connection and never answers, as a foreign program at its port does.
    """

    def end() -> None:
        print(text, file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _attempt() -> str:
    """Which start this is of processes that torchrun starts again.

    Its agent keeps one store for all starts, in which the addresses of the processes that died still stand, and a
    process that reads one before it is written anew can't connect (torch 2.13). On several machines the agents' counts
    differ; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each start a store of its own (scripts/).
    """
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"


def is_lost_contact(error: BaseException) -> bool:
    """Whether an error means that another process is gone or unresponsive."""
    words = ("gloo", "nccl", "connection closed", "connection reset", "timed out waiting")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def wrap_ddp(model: nn.Module, world: World) -> nn.Module:
    """The model as one whose gradients are the mean over all processes after each backward pass."""
    if world.size == 1:
        return model
    devices = [world.device] if world.device.type == "cuda" else None
    # Buffers are constants here, equal everywhere; sending them at each step would be one more thing to wait for.
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # torch 2.13 renames broadcast_buffers, 2.10 knows no other name.
        return nn.parallel.DistributedDataParallel(
            model, device_ids=devices, gradient_as_bucket_view=True, broadcast_buffers=False
        )
