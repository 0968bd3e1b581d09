"""What decides the result of a training: one description, for the stage's fingerprint and for the check on resuming."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nmt.config import Config, Precision, differences, of_kind
from nmt.errors import CheckpointError
from nmt.io import read_object, sha256_of
from nmt.runs.run_dir import RunDir

FORMAT = 4
"""Of identity.json; a run of another one is not resumed."""

MOST_FILES = 3
"""Changed files that are named; further ones are counted."""


@dataclass(frozen=True)
class TrainPaths:
    """The folders that a training reads, and the run folder that it writes."""

    clean: Path
    bpe: Path
    encode: Path
    run: RunDir

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", RunDir(self.run))


def training_settings(config: Config) -> dict[str, Any]:
    """The settings that decide the result of a training; the fingerprint of the stage and the run's identity."""
    decides: dict[str, Any] = {
        "data": {"src": config.data.src, "tgt": config.data.tgt},
        "bpe": {"dropout": config.bpe.dropout},
        **{name: of_kind(getattr(config, name), "result") for name in ("model", "optim", "train")},
    }
    if config.bpe.dropout:  # Each epoch is then encoded anew, and what becomes too long keeps its plain pieces.
        decides["encode"] = of_kind(config.encode, "result")
    return decides


def training_reads(config: Config, paths: TrainPaths) -> dict[str, Path]:
    """The files that decide the result of a training, by names that are the same on every machine.

    `meta.json` stands for all encoded data: it has the SHA-256 of each file, which is checked when that is opened.
    """
    models = ["joint.model"] if config.bpe.shared_vocab else [f"{lang}.model" for lang in config.clean.columns]
    splits = ("dev", "train") if config.bpe.dropout else ("dev",)
    text = [f"{split}.{lang}" for split in splits for lang in config.clean.columns]
    return {
        "encode/meta.json": paths.encode / "meta.json",
        **{f"bpe/{name}": paths.bpe / name for name in models},
        **{f"clean/{name}": paths.clean / name for name in ("normalisation.json", *text)},
    }


def identity(config: Config, paths: TrainPaths, init_from: Path | None = None) -> dict[str, Any]:
    """What decides the result of a training: its settings, the content of what it reads, and the weights it began with.

    `init_from` is the run whose final weights a training begins with.
    """
    found = {
        "format": FORMAT,
        "settings": training_settings(config),
        "reads": {name: sha256_of(path) for name, path in training_reads(config, paths).items()},
    }
    if init_from is not None:
        manifest = RunDir(init_from).final / "manifest.json"
        try:
            found["init_from"] = {"run": str(init_from), "manifest": sha256_of(manifest)}
        except OSError as error:
            raise CheckpointError(
                f"--init-from: {manifest} cannot be read ({error.strerror}); name the folder of a finished run."
            ) from error
    return found


def what_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs in the `settings` and the content of the files (`reads`) of two results, a line for each."""
    found = differences(before["settings"], now["settings"])
    old, new = before["reads"], now["reads"]
    files = [f"{name} is gone" for name in old if name not in new]
    files += [f"{name} is new" for name in new if name not in old]
    files += [f"{name} has changed" for name in new if name in old and old[name] != new[name]]
    return found + files[:MOST_FILES] + ([f"and {len(files) - MOST_FILES} more files"] * (len(files) > MOST_FILES))


def conflicts(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What keeps a run with the identity `before` from being resumed as `now`, a line for each difference.

    More steps may be asked for, unless every learning rate depends on their number.
    """
    settings = before["settings"]
    if now["settings"]["optim"]["schedule"] != "cosine":
        settings = settings | {"train": settings["train"] | {"max_steps": now["settings"]["train"]["max_steps"]}}
    if now["settings"]["train"]["precision"] == "auto":  # What the run began with is what it means here.
        settings = settings | {"train": settings["train"] | {"precision": "auto"}}
    found = what_changed(before | {"settings": settings}, now)
    if "init_from" in now and before.get("init_from", {}).get("manifest") != now["init_from"]["manifest"]:
        found.append("it did not begin with the weights that --init-from names")
    return found


def unchanged(config: Config, paths: TrainPaths, init_from: Path | None = None) -> bool:
    """Whether the run folder is one of these settings and this data."""
    try:
        return not conflicts(read_identity(paths.run), identity(config, paths, init_from))
    except (CheckpointError, OSError):
        return False


def read_identity(run: Path) -> dict[str, Any]:
    """What decided the result of a run; raises CheckpointError if that cannot be read."""
    path = RunDir(run).identity_file
    try:
        found = read_object(path)
        if found.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {found.get('format')}, this nmt reads {FORMAT}")
        if not all(isinstance(found.get(key), dict) for key in ("settings", "reads")):
            raise CheckpointError(f"{path} lacks settings or reads")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; start over with nmt train --fresh, or give a --name.") from error
    return found


def trained_precision(run: Path) -> Precision | None:
    """The precision that a run began with, which `auto` means for the rest of it; None if it has not begun."""
    if not RunDir(run).identity_file.exists():
        return None
    found: Precision = read_identity(run)["settings"].get("train", {}).get("precision", "auto")
    return found


def as_trained(config: Config, run: Path) -> Config:
    """The settings of a run with the precision that `auto` became when it began, if that is known."""
    before = trained_precision(run) if config.train.precision == "auto" else None
    return replace(config, train=replace(config.train, precision=before)) if before else config


def check_as_trained(run: Path, config: Config, vocabularies: Mapping[str, str]) -> None:
    """Raise CheckpointError for what would give the weights, or the ids, another meaning than they had in training.

    `config` is what the run folder says of itself, `vocabularies` the files of its tokenizers with their SHA-256.
    """
    if not RunDir(run).identity_file.exists():
        return  # A run that was put together by hand.
    trained = read_identity(run)
    before, reads = {name: trained["settings"].get(name, {}) for name in ("data", "model")}, trained["reads"]
    now = {name: {key: getattr(getattr(config, name), key, None) for key in before[name]} for name in before}
    if changed := differences(before, now):
        raise CheckpointError(f"{RunDir(run).config_file} is not what the run was trained with: {'; '.join(changed)}.")
    for name, found in vocabularies.items():
        wanted = reads.get(f"bpe/{Path(name).name}")
        if wanted is None:
            raise CheckpointError(f"{name} is none of the vocabularies that {run} was trained with.")
        if wanted != found:
            raise CheckpointError(
                f"{name} has SHA-256 {found}, but the run was trained with {wanted}: put that one back."
            )
    path = RunDir(run).normalisation_file
    if path.is_file() and sha256_of(path) != reads.get("clean/normalisation.json"):
        raise CheckpointError(f"{path} is not what the run was trained with; put that one back.")
