"""Opening a run folder: complete in itself from the first step on, or refused where it is another training's."""

import logging
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nmt.config import Config, differences, to_dict
from nmt.errors import CheckpointError, ConfigError
from nmt.io import installed_version, read_json, read_object, write_json
from nmt.runs.identity import TrainPaths, conflicts, identity, read_identity
from nmt.runs.overlap import keep_keys
from nmt.runs.run_dir import RunDir, read_config, tokenizer_files

log = logging.getLogger(__name__)

PACKAGES = ("torch", "numpy", "sentencepiece", "sacrebleu", "safetensors", "opencc")


def open_run(
    config: Config,
    paths: TrainPaths,
    numerics: dict[str, Any],
    *,
    fresh: bool,
    init_from: Path | None = None,
    given: Config | None = None,
) -> None:
    """Make the run folder complete in itself, or check that it is a run of the same settings and data.

    `config` has what `auto` means here; `given` are the settings as they were given, which others compare with.

    `numerics` is what changes rounding alone; another value of it than before is logged. Raises ConfigError with
    old -> new if the folder is another training's; `fresh` removes what is there.
    """
    run = paths.run
    try:
        now = identity(config, paths, init_from)
        if init_from is not None:
            _check_initial(config, run, init_from)
        if fresh:
            for path in run.made_by_training:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        if run.identity_file.exists():
            before = read_identity(run)
            _check_resumable(run, conflicts(before, now), config.train.max_steps)
            now = {**now, **{key: before[key] for key in ("init_from",) if key in before}}
            for line in differences(read_json(run.numerics_file), numerics):
                log.info("train: resuming with other numerics: %s", line)
        run.tokenizer.mkdir(parents=True, exist_ok=True)
        for path in run.tokenizer_files():
            if not (paths.bpe / path.name).exists():  # Of a training with another kind of vocabulary.
                path.unlink()
        for path in tokenizer_files(paths.bpe):
            shutil.copyfile(path, run.tokenizer / path.name)
        shutil.copyfile(paths.clean / "normalisation.json", run.normalisation_file)
        keep_keys(paths.clean, config.clean.columns, run, init_from)
        write_json(run.config_file, to_dict(given or config))
        earlier = [] if fresh else _sessions(run)
        write_json(run.provenance_file, provenance(paths) | {"earlier": earlier})
        write_json(run.numerics_file, numerics)
        write_json(run.identity_file, now)
    except OSError as error:
        raise ConfigError(f"cannot write the run folder {run}: {error.strerror} ({error.filename}).") from error


def _check_initial(config: Config, run: Path, init_from: Path) -> None:
    """Raise ConfigError if the weights of `init_from` mean something else in this model, though they may fit it."""
    if init_from.resolve() == run.resolve():
        raise ConfigError(f"--init-from names {run} itself; give the new run a --name of its own.")
    earlier = read_config(init_from)
    found = differences(_model_of(earlier), _model_of(config))
    if not config.bpe.shared_vocab and earlier.data.src != config.data.src:
        found.append(f"data.src: {earlier.data.src} -> {config.data.src} (each language has its own vocabulary)")
    if found:
        raise ConfigError(f"--init-from: {init_from} has another model:", *(f"  {line}" for line in found))


def _model_of(config: Config) -> dict[str, Any]:
    """What the weights of a run belong to: the settings of its model without those of dropout, and its vocabularies."""
    model = {name: value for name, value in to_dict(config.model).items() if not name.endswith("dropout")}
    model |= {
        "decoder_layers": config.model.decoder_layers or config.model.layers,
        "kv_heads": config.model.kv_heads or config.model.heads,
    }
    if config.model.position != "learned":
        del model["max_positions"]
    return {"model": model, "bpe": {"shared_vocab": config.bpe.shared_vocab}}


def _check_resumable(run: RunDir, conflicts: list[str], max_steps: int) -> None:
    """Raise ConfigError if the training in `run` cannot be resumed."""
    taken = run.status().get("step", 0)
    if not conflicts and isinstance(taken, int) and taken > max_steps:
        conflicts = [f"it has taken {taken:,} steps already, and train.max_steps is {max_steps:,}"]
    if conflicts:
        raise ConfigError(
            f"{run} was trained with other settings or data:",
            *(f"  {line}" for line in conflicts),
            "Resume it with the old ones, start over with nmt train --fresh, or give the new run a --name of its own.",
        )


def provenance(paths: TrainPaths) -> dict[str, Any]:
    """Where, when and with what a training was started."""
    return {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in ("nmt", *PACKAGES)},
        **source_code(),
        "clean": str(paths.clean),
        "bpe": str(paths.bpe),
        "encode": str(paths.encode),
    }


def source_code() -> dict[str, Any]:
    """The commit of this code, and whether its files differ from it (`dirty`); None where it is in no clone of its own.

    A package that is installed may lie in somebody's repository, whose commits say nothing about it.
    """
    package = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, check=False)
        except OSError:  # There is no git.
            return None
        return None if done.returncode else done.stdout.removesuffix("\n")

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() / "src" / "nmt" != package:
        return {"commit": None, "dirty": None}
    changes = git("status", "--porcelain", "--", str(package))
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def _sessions(run: RunDir) -> list[Any]:
    """What is known of the processes that have trained a run so far, the first one first."""
    try:
        last = read_object(run.provenance_file)
    except CheckpointError:  # There were none, or nothing is known.
        return []
    earlier = last.pop("earlier", [])
    return [*(earlier if isinstance(earlier, list) else []), last]
