"""A worker of a training: what it is given, how it ends."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nmt.cli import worker
from nmt.runs.run_dir import RunDir
from tiny import settings


def ended(monkeypatch, capfd, paths, config, **options):
    """What becomes of one worker that is started as the command line does it, and the file that it was given."""
    given = {}

    def start(arguments, processes):
        given.update(json.loads(Path(arguments[-1]).read_bytes()), processes=processes)
        return subprocess.run([sys.executable, *arguments], check=False).returncode

    monkeypatch.setattr(worker, "launch", start)
    code = worker.train_in_processes(config, paths, processes=1, options={"device": "cpu", **options})
    return code, given, capfd.readouterr().err


def test_a_worker_trains_with_the_settings_and_folders_of_its_file(paths, tmp_path, monkeypatch, capfd):
    mine = replace(paths, run=RunDir(tmp_path / "run"))
    code, given, log = ended(monkeypatch, capfd, mine, settings("train.max_steps=3"))
    assert code == 0, log
    assert log.startswith("train: ")  # No warning of Python's before it.
    assert mine.run.status()["step"] == 3
    assert given["processes"] == 1
    assert not (mine.run / "stamp.json").exists()  # The starter writes that.


@pytest.mark.parametrize("level", ["WARNING", "DEBUG"])
def test_a_worker_ends_with_the_code_and_the_words_of_what_went_wrong(paths, tmp_path, monkeypatch, capfd, level):
    monkeypatch.setattr(worker.logging.getLogger("nmt"), "level", getattr(worker.logging, level))
    mine = replace(paths, run=RunDir(tmp_path / "run"))
    code, _, log = ended(monkeypatch, capfd, mine, settings(), device="cuda:99")
    assert (code, "Traceback" in log) == ((1, True) if level == "DEBUG" else (2, False))
    assert "--device" in log
