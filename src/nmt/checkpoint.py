"""Weights and training state on disk: folders of safetensors and JSON, hashed, written whole or not at all.

A folder holds `model.safetensors`, perhaps `optimizer.safetensors`, `state.json` and, written last, `manifest.json`
with the SHA-256 of each. It is made under a temporary name and renamed when all of it is on the disk.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nmt.config import Config
from nmt.errors import CheckpointError
from nmt.model import Transformer

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"


def save(
    folder: Path, weights: Mapping[str, Tensor], state: Mapping[str, Any], optimizer: Mapping[str, Tensor] | None = None
) -> None:
    """Write a checkpoint as `folder`, in place of what was there; an interruption leaves the old one or the new."""
    part = folder.with_name(f".{folder.name}.part")
    old = folder.with_name(f".{folder.name}.old")
    for left_over in (part, old):
        shutil.rmtree(left_over, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, part / "model.safetensors")
        if optimizer is not None:
            save_file(dict(optimizer), part / "optimizer.safetensors")
        (part / "state.json").write_text(json.dumps(state, indent=2) + "\n")
        hashes = {path.name: _sha256(path) for path in sorted(part.iterdir())}
        for name in hashes:
            _sync(part / name)
        (part / MANIFEST).write_text(json.dumps(hashes, indent=2) + "\n")
        _sync(part / MANIFEST)
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        free = shutil.disk_usage(folder.parent).free if folder.parent.exists() else 0
        raise CheckpointError(
            f"cannot write the checkpoint {folder}: {error}; {free:,} bytes are free. Older checkpoints are whole."
        ) from error
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fault(folder: Path) -> str | None:
    """Why the checkpoint in `folder` must not be used, or None if every file is what its manifest says."""
    try:
        hashes = json.loads((folder / MANIFEST).read_text())
        if not isinstance(hashes, dict) or "model.safetensors" not in hashes or "state.json" not in hashes:
            return f"{folder / MANIFEST} names no weights"
        for name, expected in hashes.items():
            if Path(name).name != name or _sha256(folder / name) != expected:
                return f"{folder / name} is not what was written (its SHA-256 differs)"
    except (OSError, ValueError) as error:
        return f"{folder} is not whole ({error})"
    return None


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and state; raises CheckpointError if a file is missing or was changed."""
    reason = fault(folder)
    if reason:
        raise CheckpointError(f"{reason}; use another checkpoint, or train again.")
    return load_file(folder / "model.safetensors"), json.loads((folder / "state.json").read_text())


def load_optimizer(folder: Path) -> dict[str, Tensor]:
    """The optimizer's tensors of a checkpoint that `load` has accepted."""
    return load_file(folder / "optimizer.safetensors")


# ── the checkpoints of a run ────────────────────────────────────────────────────────────────────────────────────────


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"step-{step:08d}"


def saved_steps(run: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first, by step and not by the clock."""
    found = [path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=lambda path: int(path.name[5:]))


def newest(run: Path) -> Path | None:
    """The newest whole checkpoint; a damaged one is passed over with a warning. Raises if all are damaged."""
    folders = saved_steps(run)
    for folder in reversed(folders):
        reason = fault(folder)
        if reason is None:
            return folder
        log.warning("passing over a damaged checkpoint: %s", reason)
    if folders:
        raise CheckpointError(f"no checkpoint in {run / 'checkpoints'} is whole; start over with --fresh.")
    return None


def prune(run: Path, keep: int, every: int) -> None:
    """Remove all but the newest checkpoint and the newest before it whose step is a multiple of `every`; `keep` in all.

    What was saved between for a signal goes as soon as it is not needed, so that a training which was interrupted
    ends by averaging the same checkpoints as one that was not.
    """
    folders = saved_steps(run)
    regular = [folder for folder in folders[:-1] if int(folder.name[5:]) % every == 0]
    kept = {*regular[len(regular) - min(len(regular), keep - 1) :], *folders[-1:]}
    for folder in folders:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def average(checkpoints: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each weight, summed in float64; raises CheckpointError if names or shapes differ."""
    first = checkpoints[0]
    for other in checkpoints[1:]:
        if {n: t.shape for n, t in other.items()} != {n: t.shape for n, t in first.items()}:
            raise CheckpointError("these checkpoints are not of one model: their weights differ in name or shape.")
    return {
        name: torch.stack([c[name].double() for c in checkpoints]).mean(0).to(tensor.dtype)
        for name, tensor in first.items()
    }


# ── between tensors by name and objects ─────────────────────────────────────────────────────────────────────────────


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Adam's moments and step counts by the names of the parameters; empty before the first step."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give every parameter the moments that `optimizer_tensors` took."""
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
        model.load_state_dict(dict(weights))
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"the weights do not fit the settings of their run: {error}") from error
    return model.eval()


def load_model(run: Path, config: Config, folder: Path | None = None) -> Transformer:
    """The final model of a run, or the one in `folder`; raises CheckpointError when the run has none yet."""
    folder = folder or run / "final"
    if not folder.exists():
        raise CheckpointError(
            f"{run} has no final model; finish its training with nmt train, or make one with nmt average."
        )
    return build_model(config, load(folder)[0])


def average_folders(folders: Iterable[Path]) -> dict[str, Tensor]:
    """The averaged weights of checkpoint folders."""
    return average([load(folder)[0] for folder in folders])
