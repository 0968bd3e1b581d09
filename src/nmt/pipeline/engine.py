"""Stages, and whether what they made is still what they would make: fingerprints, stamps, `run` and `status`.

A stage is a plain value. Its fingerprint covers its name, its settings, its format number and the content of what it
reads; the stamp in its folder holds the fingerprint that the folder was made with. Nothing here knows which stages
there are.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from nmt.errors import ConfigError, DataError, writing
from nmt.io import installed_version, read_json, sha256_of, write_json
from nmt.runs.identity import what_changed

log = logging.getLogger(__name__)

STAMP = "stamp.json"
"""Written last: a folder without it was never finished."""

S = TypeVar("S", bound=Sequence["Stage"])

ContentHash = Callable[[Path], str]
"""SHA-256 of a file's content, in hex."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a pipeline."""

    name: str
    reads: Mapping[str, Path]
    """Each file that is read, under a name that is the same on every machine."""
    hashes: Mapping[str, str]
    """The content of the same files, as far as they exist."""
    settings: Mapping[str, Any]
    """What the result depends on, as plain values."""
    action: Callable[[Path], None]
    """Does the work, into the folder that it is given."""
    writes: Path
    """The folder that the result lies in."""
    result: str = ""
    """The part of the folder that others rely on. A stage that names one works in `writes` itself and goes on there
    after an interruption; any other works beside it and starts over."""
    format: int = 1
    """Goes up when the same settings and files would now make something else."""
    packages: Sequence[str] = ()
    """What else the result depends on: a status says so if another version of one has made it."""
    made: Mapping[str, str] = field(default_factory=dict)
    """The content, as it is now, of the files that the stage has written."""

    @property
    def missing(self) -> list[Path]:
        """What is read but isn't there yet."""
        return [path for name, path in self.reads.items() if name not in self.hashes]

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex; empty while something that is read is missing."""
        if self.missing:
            return ""
        facts = {"name": self.name, "format": self.format, "settings": self.settings, "reads": self.hashes}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class State:
    """The state of a stage, and the reason."""

    stage: Stage
    word: Literal["up_to_date", "out_of_date", "missing", "blocked"]
    reason: str = ""

    def __str__(self) -> str:
        note = f"; {self.reason}" if self.reason else ""
        words = {
            "up_to_date": f"up to date ({self.stage.writes}){note}",
            "blocked": f"blocked by {self.reason}",
            "missing": self.reason,
        }
        return f"{self.stage.name}: {words.get(self.word, f'out of date, {self.reason}')}"


# ── what a stage reads ────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def cached_hashes(memory: Path) -> Iterator[ContentHash]:
    """A content hash that reads a file again only when its inode, its size or one of its times has changed.

    `memory` may be lost, or be written by several processes at once: that costs time. An answer is wrong only where a
    file was changed while the system's clock was set back; the time of the last change cannot be set like the others.
    """
    known: dict[str, Any] = read_json(memory)
    before = dict(known)

    def content_hash(path: Path) -> str:
        found, place = path.stat(), os.path.abspath(path)
        facts = [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        entry = known.get(place)
        if isinstance(entry, list) and entry[:-1] == facts:
            return str(entry[-1])
        content = sha256_of(path)
        # A file that was written a moment ago may be written again with the same size within one tick of the clock.
        if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > 2_000_000_000:
            known[place] = [*facts, content]
        return content

    yield content_hash
    if known != before and memory.parent.is_dir():
        with contextlib.suppress(OSError):
            write_json(memory, {place: entry for place, entry in known.items() if os.path.exists(place)})


def make_stage(
    name: str,
    *,
    reads: Mapping[str, Path],
    settings: Mapping[str, Any],
    action: Callable[[Path], None],
    writes: Path,
    content_hash: ContentHash,
    result: str = "",
    format: int = 1,
    packages: Sequence[str] = (),
    numbered: bool = False,
) -> Stage:
    """A stage; a folder among `reads` stands for every file in it but its stamp.

    If it is `numbered`, its folder has the start of its fingerprint in its name, so that equal settings share a folder.
    """
    files: dict[str, Path] = {}
    for role, path in reads.items():
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and file.name != STAMP)
            files |= {f"{role}/{file.relative_to(path).as_posix()}": file for file in inside}
        else:
            files[role] = path
    stage = Stage(
        name=name,
        reads=files,
        hashes={role: content_hash(path) for role, path in files.items() if path.is_file()},
        settings=json.loads(json.dumps(settings)),
        action=action,
        writes=writes,
        result=result,
        format=format,
        packages=packages,
    )
    if numbered:
        stage = replace(stage, writes=writes.with_name(f"{writes.name}-{stage.fingerprint[:8] or '????????'}"))
    made = {file: stage.writes / file for file in read_stamp(stage.writes).get("wrote", {})}
    return replace(stage, made={file: content_hash(path) for file, path in made.items() if path.is_file()})


# ── how things stand ──────────────────────────────────────────────────────────────────────────────────────────────────


def status(stages: Sequence[Stage]) -> list[State]:
    """Return the state of each stage, in order, without running anything."""
    states: list[State] = []
    for stage in stages:
        state = _state(stage, [other.stage for other in states])
        awaited = [s.stage.name for s in states if s.word != "up_to_date" and _reads_from(stage, s.stage)]
        states.append(State(stage, "blocked", awaited[-1]) if awaited else state)
    return states


def _reads_from(stage: Stage, other: Stage) -> bool:
    return any(path.is_relative_to(other.writes) for path in stage.reads.values())


def _state(stage: Stage, before: Sequence[Stage]) -> State:
    if stage.missing:
        makers = [other.name for other in before if any(path.is_relative_to(other.writes) for path in stage.missing)]
        if makers:
            return State(stage, "blocked", makers[-1])
        return State(stage, "out_of_date", f"{stage.missing[0]} is missing")
    stamp = read_stamp(stage.writes)
    if stamp.get("fingerprint") == stage.fingerprint:
        lost = _lost(stage, stamp)
        if lost:
            return State(stage, "out_of_date", f"{lost[0]} is not as it was made")
        return State(stage, "up_to_date", _other_versions(stage, stamp))
    stamp = stamp or _newest_stamp(stage)
    if stamp:
        return State(stage, "out_of_date", _why(stage, stamp))
    begun = stage.result and stage.writes.is_dir()
    return State(stage, "missing", "started, not finished" if begun else "not made yet")


def _why(stage: Stage, stamp: Mapping[str, Any]) -> str:
    """What differs between `stamp` and the stage as it is now."""
    found = what_changed(stamp, {"settings": stage.settings, "reads": stage.hashes})
    if stamp.get("format") != stage.format:
        found.append(f"nmt now writes format {stage.format}, this is {stamp.get('format')}")
    return "; ".join(found) or "made by another version of nmt"


def _newest_stamp(stage: Stage) -> dict[str, Any]:
    """The stamp of the folder that was made last by the same stage with other settings or files."""
    if stage.result:
        return {}
    pattern = re.compile(re.escape(stage.name) + r"-[0-9a-f]{8}")
    stamps = [s for s in stage.writes.parent.glob(f"{stage.name}-*/{STAMP}") if pattern.fullmatch(s.parent.name)]
    return read_stamp(max(stamps, key=lambda path: path.stat().st_mtime_ns).parent) if stamps else {}


def read_stamp(folder: Path) -> dict[str, Any]:
    """The stamp of a folder; empty when there is none that can be read."""
    stamp = read_json(folder / STAMP)
    whole = all(isinstance(stamp.get(part), dict) for part in ("settings", "reads", "wrote"))
    return stamp if whole else {}


def _lost(stage: Stage, stamp: Mapping[str, Any]) -> list[Path]:
    """Files that the stamp speaks of and that are gone or have other content."""
    return [stage.writes / name for name, content in stamp["wrote"].items() if stage.made.get(name) != content]


def _other_versions(stage: Stage, stamp: Mapping[str, Any]) -> str:
    """With what other versions of packages the result was made than are installed now."""
    then, now = stamp.get("versions", {}), _versions()
    found = [f"{name} {then[name]}" for name in stage.packages if name in then and then[name] != now.get(name)]
    here = [f"{name} {now.get(name, 'not installed')}" for name in stage.packages if then.get(name) != now.get(name)]
    return f"made with {', '.join(found)}, here is {', '.join(here)}" if found else ""


# ── acting ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def run(build: Callable[[], S], upto: str | None = None, since: str | None = None) -> S:
    """Run the stages from `since` to `upto` that are not up to date, and return all stages afterwards.

    They are built anew after each stage that acted, for names of folders depend on what earlier stages wrote.
    """
    stages = build()
    names = [stage.name for stage in stages]
    for name in (upto, since):
        if name is not None and name not in names:
            raise ConfigError(f"there is no stage {name}; the pipeline has {', '.join(names)}.")
    for position in range(names.index(since) if since else 0, names.index(upto) + 1 if upto else len(names)):
        state = _state(stages[position], stages[:position])
        if state.word != "up_to_date":
            # Another process may have made it, or what it depends on, since the stages were built.
            stages = build()
            state = _state(stages[position], stages[:position])
        log.info("%s", state)
        if state.word == "blocked":
            raise DataError(f"{state}, which must be run before it; nmt run runs all stages in order.")
        if state.word != "up_to_date":
            act(state.stage)
            stages = build()
    return stages


def act(stage: Stage, *, stamps: bool = True) -> None:
    """Run a stage whatever its state, and write its stamp beside the result.

    Of several processes that do the work of one together, all but one come without `stamps`.
    """
    if stage.missing:
        raise DataError(f"{stage.name}: {stage.missing[0]} is missing.")
    begun = time.monotonic()
    if stage.result:
        stage.writes.mkdir(parents=True, exist_ok=True)
        with writing(stage.writes):
            stage.action(stage.writes)
            if stamps:
                write_stamp(stage, stage.writes, time.monotonic() - begun)
        return
    home = stage.writes.parent
    home.mkdir(parents=True, exist_ok=True)
    _sweep(home, stage.name)
    part = home / f".{stage.writes.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        part.mkdir()
        with writing(part):
            stage.action(part)
            write_stamp(stage, part, time.monotonic() - begun)
        _move(part, stage)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    log.info("%s: done in %.1f s (%s)", stage.name, time.monotonic() - begun, stage.writes)


def write_stamp(stage: Stage, folder: Path, seconds: float) -> None:
    """Say that `folder` holds what the stage makes of its settings and files as they are now."""
    write_json(
        folder / STAMP,
        {
            "stage": stage.name,
            "fingerprint": stage.fingerprint,
            "format": stage.format,
            "settings": stage.settings,
            "reads": stage.hashes,
            "wrote": _contents(folder, stage.result),
            "seconds": round(seconds, 3),
            "versions": _versions(),
        },
    )


def _contents(folder: Path, result: str) -> dict[str, str]:
    """The SHA-256 of each file of a stage's result."""
    files = [file for file in sorted((folder / result).rglob("*")) if file.is_file() and file.name != STAMP]
    return {file.relative_to(folder).as_posix(): sha256_of(file) for file in files}


@contextlib.contextmanager
def replacing_result(folder: Path, result: str) -> Iterator[None]:
    """What the block puts in place of the result of a finished stage is its result from now on."""
    stamp = read_stamp(folder)
    whole = bool(stamp) and stamp["wrote"] == _contents(folder, result)
    yield
    if whole:
        write_json(folder / STAMP, stamp | {"wrote": _contents(folder, result)})


def _move(part: Path, stage: Stage) -> None:
    """Give a finished folder its name, unless another process has just put the same thing there."""
    old = part.with_suffix(".old")
    for last in (False, True):
        try:
            # Succeeds only where nothing is, so that nobody loses a folder that he has begun to read.
            part.rename(stage.writes)
            return
        except OSError as error:
            stamp = read_stamp(stage.writes)
            same = stamp.get("fingerprint") == stage.fingerprint
            if same and stamp["wrote"] == _contents(stage.writes, stage.result):
                return
            if last:
                raise DataError(f"{stage.name}: cannot rename {part} to {stage.writes}: {error.strerror}.") from error
        with contextlib.suppress(FileNotFoundError):
            stage.writes.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _sweep(home: Path, name: str) -> None:
    """Remove what a killed process left behind, once it is a day old."""
    for left_over in (*home.glob(f".{name}*.part"), *home.glob(f".{name}*.old")):
        with contextlib.suppress(OSError):
            if time.time() - left_over.stat().st_mtime > 86_400:
                shutil.rmtree(left_over, ignore_errors=True)


def _versions() -> dict[str, str]:
    found = {name: installed_version(name) for name in ("nmt", "torch", "sentencepiece", "sacrebleu", "opencc")}
    return {"python": platform.python_version()} | {name: version for name, version in found.items() if version}
