"""What a run says of the code that made it."""

import json
import subprocess
from pathlib import Path

import pytest

from nmt.runs import opening
from nmt.training.loop import train_model
from tiny import ALONE, at, settings


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    return subprocess.run(
        ["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A clone of a project with a package at src/nmt, which this code takes itself for."""
    package = tmp_path / "clone/src/nmt"
    package.mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    (tmp_path / "clone/README.md").write_text("read me\n")
    git(tmp_path / "clone", "init", "-q")
    git(tmp_path / "clone", "add", "-A")
    git(tmp_path / "clone", "commit", "-qm", "one")
    monkeypatch.setattr(opening, "__file__", str(package / "runs" / "opening.py"))
    return tmp_path / "clone"


def test_the_commit_of_a_clean_clone_is_told(clone):
    assert opening.source_code() == {"commit": git(clone, "rev-parse", "HEAD"), "dirty": False}


@pytest.mark.parametrize("change", ["edited", "new", "removed", "staged", "renamed"])
def test_code_that_differs_from_its_commit_is_dirty(clone, change):
    file = clone / "src/nmt/a.py"
    if change == "new":
        (clone / "src/nmt/b.py").write_text("")
    elif change == "removed":
        file.unlink()
    elif change == "renamed":
        file.rename(clone / "src/nmt/c.py")
    else:
        file.write_text("a = 2\n")
    if change == "staged":
        git(clone, "add", "-A")
    assert opening.source_code() == {"commit": git(clone, "rev-parse", "HEAD"), "dirty": True}


def test_what_is_no_code_makes_no_code_dirty(clone):
    (clone / "README.md").write_text("read me again\n")
    (clone / "notes.txt").write_text("notes\n")
    assert opening.source_code()["dirty"] is False


def test_a_package_that_is_installed_inside_another_repository_has_not_its_commit(clone, monkeypatch):
    site = clone / ".venv/lib/python3/site-packages/nmt"
    site.mkdir(parents=True)
    monkeypatch.setattr(opening, "__file__", str(site / "runs" / "opening.py"))
    assert opening.source_code() == {"commit": None, "dirty": None}


def test_outside_any_repository_and_without_git_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "__file__", str(tmp_path / "src/nmt/runs/opening.py"))
    assert opening.source_code() == {"commit": None, "dirty": None}
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert opening.source_code() == {"commit": None, "dirty": None}


def test_a_machine_without_git_trains(paths, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    train_model(settings("train.max_steps=2"), at(paths, tmp_path / "run"), ALONE)
    assert json.loads((tmp_path / "run/provenance.json").read_text())["commit"] is None


def test_every_process_that_trained_a_run_is_remembered_until_it_starts_over(paths, tmp_path, monkeypatch):
    run = at(paths, tmp_path / "run")

    def train(commit: str, steps: int, **more: bool) -> dict:
        monkeypatch.setattr(opening, "source_code", lambda: {"commit": commit, "dirty": False})
        train_model(settings(f"train.max_steps={steps}"), run, ALONE, **more)
        return json.loads((run.run / "provenance.json").read_text())

    assert train("a", 2)["earlier"] == []
    train("b", 4)
    found = train("c", 6)
    assert [session["commit"] for session in (*found["earlier"], found)] == ["a", "b", "c"]
    assert all("earlier" not in session for session in found["earlier"])
    # A finished run is left alone, whoever looks at it.
    assert train("d", 6) == found
    (run.run / "provenance.json").write_text("{")
    assert train("e", 8)["earlier"] == []
    assert train("f", 8, fresh=True)["earlier"] == []
