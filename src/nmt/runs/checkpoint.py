"""Weights and training state on disk: folders of safetensors and JSON, hashed, written whole or not at all.

A folder holds `model.safetensors`, perhaps `optimizer.safetensors`, `state.json` and, written last, `manifest.json`
with the SHA-256 of each. `NAME` is made as `.NAME.part` and renamed when all of it is on the disk; what it replaces is
`.NAME.old` for that moment. So one of `NAME` and `.NAME.old` is always whole, whenever the process is killed.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nmt.config import Config
from nmt.errors import CheckpointError, free_bytes
from nmt.io import read_object, sha256_of
from nmt.model.transformer import Transformer
from nmt.runs.run_dir import RunDir

log = logging.getLogger(__name__)

MANIFEST, MODEL, OPTIMIZER, STATE = "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"

T = TypeVar("T")


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def save(
    folder: Path, weights: Mapping[str, Tensor], state: Mapping[str, Any], optimizer: Mapping[str, Tensor] | None = None
) -> None:
    """Write a checkpoint as `folder`, in place of what was there; an interruption leaves the old one or the new."""
    part = _beside(folder, "part")
    try:
        _settle(folder)
        part.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, part / MODEL)
        if optimizer is not None:
            save_file(dict(optimizer), part / OPTIMIZER)
        (part / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        hashes = {path.name: sha256_of(path) for path in sorted(part.iterdir())}
        for name in hashes:
            _sync(part / name)
        (part / MANIFEST).write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")
        _sync(part / MANIFEST)
        _sync(part)
        if folder.exists():
            folder.rename(_beside(folder, "old"))
        part.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint {folder}: {error}; {free_bytes(folder):,} bytes are free there. "
            "Older checkpoints are whole."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            _settle(folder)


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(f".{folder.name}.{ending}")


def _settle(folder: Path) -> None:
    """Leave nothing beside `folder`: what an interrupted `save` replaced gets its name back, what it began goes."""
    part, old = _beside(folder, "part"), _beside(folder, "old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    for left_over in (part, old):
        shutil.rmtree(left_over, ignore_errors=True)


def recover(run: Path) -> None:
    """Put right what a process that was killed while it wrote left in a run folder; for the holder of its lock."""
    for path in [*run.glob(".*"), *RunDir(run).checkpoints.glob(".*")]:
        # Other names with two endings are not ours.
        if found := re.fullmatch(r"\.([^.]+)\.(?:part|old)", path.name):
            _settle(path.with_name(found[1]))
    for left_over in run.glob("*.json.*.part"):  # As nmt.io.write_json names them.
        left_over.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _standing(folder: Path) -> Path:
    """`folder`, or where it is if a process was killed while it replaced it."""
    old = _beside(folder, "old")
    return old if old.exists() and not folder.exists() else folder


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error


class _Stored(Mapping[str, Tensor]):
    """The tensors of a file, each read on access and not cached."""

    def __init__(self, path: Path) -> None:
        try:
            self.file = cast(Any, safe_open(path, "pt"))
            self.names: list[str] = list(self.file.keys())
        except (OSError, SafetensorError, ValueError, MemoryError) as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error

    def __getitem__(self, name: str) -> Tensor:
        return cast(Tensor, self.file.get_tensor(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _check(folder: Path) -> None:
    """Raise CheckpointError unless every file is there and is what the manifest says."""
    manifest = folder / MANIFEST
    hashes = read_object(manifest)
    if any(not isinstance(value, str) for value in hashes.values()):
        raise CheckpointError(f"{manifest} has something else than hashes")
    if not {MODEL, STATE} <= hashes.keys() <= {MODEL, STATE, OPTIMIZER}:
        raise CheckpointError(f"{manifest} names {', '.join(map(repr, hashes)) or 'nothing'}, not a checkpoint's files")
    if OPTIMIZER not in hashes and (folder / OPTIMIZER).exists():
        raise CheckpointError(f"{folder / OPTIMIZER} is not in {MANIFEST}")
    for name, expected in hashes.items():
        try:
            found = sha256_of(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read ({error.strerror})") from error
        if found != expected:
            raise CheckpointError(f"{folder / name} is not what was written (its SHA-256 differs)")


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    _check(folder)
    return _tensors(folder / MODEL), read_object(folder / STATE)


def fault(folder: Path) -> str | None:
    """Why the checkpoint in `folder` must not be used, or None if it is what was written; holds none of its tensors."""
    try:
        folder = _standing(folder)
        _check(folder)
        _Stored(folder / MODEL)
        read_object(folder / STATE)
    except CheckpointError as error:
        return str(error)
    return None


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and state; raises CheckpointError if a file is missing or was changed."""
    try:
        return _read(_standing(folder))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; use another checkpoint, or train again.") from error


def load_optimizer(folder: Path) -> dict[str, Tensor]:
    """The optimizer's tensors of a checkpoint that `load` has accepted."""
    return _tensors(_standing(folder) / OPTIMIZER)


# ── the checkpoints of a run ──────────────────────────────────────────────────────────────────────────────────────────


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return RunDir(run).checkpoints / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step of a checkpoint folder."""
    return int(folder.name[5:])


def saved_steps(run: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first, by step and not by the clock."""
    found = [path for path in RunDir(run).checkpoints.glob("step-*") if re.fullmatch(r"step-[0-9]{8,}", path.name)]
    return sorted(found, key=step_of)


def _newest_that(run: Path, use: Callable[[Path], T]) -> T | None:
    """What `use` makes of the newest checkpoint that it takes; it refuses one by raising CheckpointError."""
    folders = saved_steps(run)
    for folder in reversed(folders):
        try:
            return use(folder)
        except CheckpointError as error:
            log.warning("passing over a damaged checkpoint: %s", error)
    if folders:
        raise CheckpointError(f"no checkpoint in {RunDir(run).checkpoints} can be used; start over with --fresh.")
    return None


def newest(run: Path) -> Path | None:
    """The newest whole checkpoint; a damaged one is passed over with a warning. Raises if all are damaged."""

    def whole(folder: Path) -> Path:
        _read(folder)
        return folder

    return _newest_that(run, whole)


def load_newest(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, kind: type[T]) -> tuple[Path, T] | None:
    """Fill model and optimizer from the newest checkpoint that is whole and fits them; its folder and its state.

    Others are passed over with a warning; raises CheckpointError if all are. None, and nothing is changed, where there
    is no checkpoint.
    """
    return _newest_that(run, lambda folder: (folder, load_training(folder, model, optimizer, kind)))


def load_training(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, kind: type[T]) -> T:
    """Fill model and optimizer from this checkpoint; its state, as a `kind`, a dataclass of plain values.

    Raises CheckpointError, and changes nothing, if the checkpoint is damaged or does not fit.
    """
    (weights, state), moments = _read(folder), load_optimizer(folder)
    found = _state(folder / STATE, state, kind)
    _check_fit(folder / MODEL, weights, model.state_dict())
    _check_fit(folder / OPTIMIZER, moments, _moments(model))
    model.load_state_dict(weights)
    restore_optimizer(optimizer, model, moments)
    return found


def _state(path: Path, values: Mapping[str, Any], kind: type[T]) -> T:
    """The values as a dataclass; raises CheckpointError if it has no such fields, or fields of other types.

    A field that is missing has its default: an older nmt did not know it.
    """
    assert is_dataclass(kind)
    types = get_type_hints(kind)
    if not values or not values.keys() <= types.keys():
        raise CheckpointError(f"{path} has {', '.join(map(repr, values)) or 'nothing'}; expected {', '.join(types)}")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, types[name]):
            raise CheckpointError(f"{path}: {name} is {str(value)[:40]!r}, not {types[name]}")
    try:
        return kind(**values)
    except TypeError as error:  # A field that has no default is missing.
        raise CheckpointError(f"{path} has {', '.join(map(repr, values))}; expected {', '.join(types)}") from error


def prune(run: Path, keep: int, every: int, latest: int) -> None:
    """Keep the checkpoint of step `latest` and the newest before it at multiples of `every`; `keep` in all.

    What was saved between for a signal goes as soon as it is not needed, so that a training which was interrupted ends
    by averaging the same checkpoints as one that was not. A later one was damaged and passed over: it goes as well.
    """
    folders = saved_steps(run)
    before = [folder for folder in folders if step_of(folder) < latest and step_of(folder) % every == 0]
    kept = {*before[max(0, len(before) - keep + 1) :], step_folder(run, latest)}
    for folder in folders:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def average(checkpoints: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each weight, summed in float64; raises CheckpointError if names or shapes differ.

    However many checkpoints there are, no more is held than the sum, which is as large as two of them.
    """
    sums: dict[str, Tensor] = {}
    kinds: dict[str, torch.dtype] = {}
    for count, weights in enumerate(checkpoints, 1):
        if count > 1 and weights.keys() != sums.keys():
            raise CheckpointError(_OTHERS)
        for name in weights:
            tensor = weights[name]
            if count == 1:
                sums[name], kinds[name] = tensor.to(torch.float64, copy=True), tensor.dtype
            elif (tensor.shape, tensor.dtype) != (sums[name].shape, kinds[name]):
                raise CheckpointError(_OTHERS)
            else:
                sums[name] += tensor
    return {name: sums.pop(name).div_(count).to(kind) for name, kind in kinds.items()}


_OTHERS = "these checkpoints are not of one model: their weights differ in name or shape."


def manifest_hash(folder: Path) -> str:
    """SHA-256 of a checkpoint's manifest, and so of all that is in the checkpoint."""
    try:
        return sha256_of(_standing(folder) / MANIFEST)
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read ({error.strerror})") from error


# ── between tensors by name and objects ───────────────────────────────────────────────────────────────────────────────


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.") for name, tensor in tensors.items()}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and values; equal where they are equal bit for bit, on whatever device."""
    total = hashlib.sha256(json.dumps(_shapes(tensors), sort_keys=True).encode())
    for name in sorted(tensors):
        total.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _check_fit(what: object, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError, with the first difference, unless both have the same names, types and shapes."""
    here, wanted = _shapes(found), _shapes(expected)
    for name in sorted(here.keys() | wanted.keys()):
        if here.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{what} does not fit: {name} is {here.get(name, 'missing')}, expected {wanted.get(name, 'nothing')}"
            )


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Adam's moments and step counts by the names of the parameters; empty before the first step."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def _moments(model: nn.Module) -> dict[str, Tensor]:
    """What `optimizer_tensors` gives after a step of Adam, but for the values."""
    count = torch.zeros((), dtype=torch.float32)
    return {
        f"{name}.{key}": value.detach()
        for name, parameter in model.named_parameters()
        for key, value in (("step", count), ("exp_avg", parameter), ("exp_avg_sq", parameter))
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give every parameter the moments that `optimizer_tensors` took; raises CheckpointError if they are others."""
    _check_fit("the optimizer's state", tensors, _moments(model))
    parameters = dict(model.named_parameters())
    for name, value in tensors.items():
        parameter, _, key = name.rpartition(".")
        # Adam keeps its step count on the device only if it is fused there.
        optimizer.state[parameters[parameter]][key] = value.to(parameters[parameter].device)


def build_model(config: Config, weights: Mapping[str, Tensor]) -> Transformer:
    """The model of these weights, in evaluation mode; the vocabularies are as large as the embeddings."""
    try:
        src = weights.get("src_embedding.weight")
        model = Transformer(config.model, len(weights["embedding.weight"]), None if src is None else len(src))
        _check_fit("the model", weights, model.state_dict())
        model.load_state_dict(dict(weights))
    except (KeyError, TypeError, RuntimeError, CheckpointError) as error:
        raise CheckpointError(f"the weights do not fit the settings of their run: {error}") from error
    return model.eval()


def load_model(run: Path, config: Config, folder: Path | None = None) -> Transformer:
    """The final model of a run, or the one in `folder`; raises CheckpointError when the run has none yet."""
    folder = _standing(folder or RunDir(run).final)
    if not folder.exists():
        raise CheckpointError(
            f"{run} has no final model; finish its training with nmt train, or make one with nmt average."
        )
    return build_model(config, load(folder)[0])


def average_folders(folders: Iterable[Path]) -> dict[str, Tensor]:
    """The averaged weights of checkpoint folders in which `fault` has found nothing."""
    return average(_Stored(_standing(folder) / MODEL) for folder in folders)
