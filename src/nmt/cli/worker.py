"""One process of a training started by `nmt train` or `nmt run`, with a file as its only argument.

The file is JSON with the settings, folders and options. A worker makes no data and writes no stamp.
"""

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nmt.config import Config, from_dict, to_dict
from nmt.distributed.launcher import launch
from nmt.pipeline.stages import train_here
from nmt.runs.identity import TrainPaths
from nmt.runs.run_dir import RunDir


def train_in_processes(config: Config, paths: TrainPaths, *, processes: int, options: dict[str, Any]) -> int:
    """Train in several processes of this machine; returns 0, or the exit code of the first that failed.

    `options` are those of nmt.pipeline.stages.train_here.
    """
    given = {
        "config": to_dict(config),
        "paths": {name: str(getattr(paths, name)) for name in ("clean", "bpe", "encode", "run")},
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
        "log_level": logging.getLogger("nmt").level,
    }
    with tempfile.NamedTemporaryFile("w", prefix="nmt-", suffix=".json", encoding="utf-8") as file:
        json.dump(given, file)
        file.flush()
        # Not -m: the package imports this module, so Python would run it twice, and warn.
        return launch(["-c", "from nmt.cli.worker import main; main()", file.name], processes)


def work(words: Sequence[str]) -> None:
    """Train with the settings, folders and options of the file that is the only argument."""
    given = json.loads(Path(words[0]).read_bytes())
    set_up_logging(given["log_level"])
    folders = {name: Path(path) for name, path in given["paths"].items()}
    paths = TrainPaths(**{name: folders[name] for name in ("clean", "bpe", "encode")}, run=RunDir(folders["run"]))
    options = given["options"]
    if options.get("init_from"):
        options["init_from"] = Path(options["init_from"])
    train_here(from_dict(given["config"]), paths, **options)


def set_up_logging(level: int) -> None:
    """Log to stderr: our own messages from `level` on, warnings of other libraries."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
    logging.getLogger("nmt").setLevel(level)


def main() -> None:
    """Run this process as a worker, and exit with its code."""
    from nmt.cli import run_and_exit

    run_and_exit(work, sys.argv[1:])
