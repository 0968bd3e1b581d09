"""From raw files to clean, split text: `clean_corpus` is the stage, the rest are its steps.

Rows stream through twice: once from the sources, normalised and judged, into one file of kept rows; once from there
into the sets. What stays in memory for each row is two 64-bit keys and its role.
"""

import functools
import importlib.metadata
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nmt.config import CleanConfig, to_dict
from nmt.corpus.heldout import GivenSet, read_given
from nmt.corpus.mending import mend
from nmt.corpus.normalise import Normaliser
from nmt.corpus.parallel import in_order, worker_count
from nmt.corpus.reading import Chunk, Facts, Sources, chunks, inspect, rows
from nmt.corpus.rules import RULES, Pair, first_objection
from nmt.corpus.script import script_of
from nmt.corpus.splitting import Keys, first_of_equal, hash_key, random_leak, sentence_key, split_groups
from nmt.errors import DataError
from nmt.text import write_lines

SAMPLES = 5
"""Rows shown for each reason in the report."""
SAMPLE_CHARACTERS = 120

STRUCTURAL = {
    "undecodable": "bytes that are not text in clean.encoding",
    "columns": "not two or three columns",
    "duplicate": "the same pair but for case, width, script and punctuation",
    "held_out": "a sentence that dev or test has",
}
"""Reasons that are no rule of a single pair."""


def clean_corpus(sources: Sources, settings: CleanConfig, out: Path, workers: int | None = None) -> dict[str, Any]:
    """Clean and split `sources` into the empty folder `out`; returns the report, which is also in `report.json`.

    The files are the same for any number of workers.
    """
    names = list(sources)
    facts = {name: inspect(name, files, settings) for name, files in sources.items()}
    normaliser = Normaliser(settings.zh_script, dict(zip(settings.columns, _han_sides(facts), strict=True)))
    given = {
        part: read_given(part, tuple(map(Path, files)), settings.columns)
        for part, files in (("dev", settings.dev), ("test", settings.test))
        if files
    }
    processes = worker_count(sum(file["bytes"] for fact in facts.values() for file in fact.files), workers)
    tally = Tally(names)
    kept_rows, rejected_rows = out / ".kept.part", out / "rejected.tsv"
    try:
        with open(kept_rows, "wb") as kept, open(rejected_rows, "wb") as rejected:
            rejected.write("\t".join(("reason", "source", "line", *settings.columns)).encode() + b"\n")
            cleaner = functools.partial(clean_chunk, settings=settings, normaliser=normaliser, names=tuple(names))
            for found in in_order(cleaner, chunks(list(sources.values())), processes):
                tally.add(found, kept, rejected)
            left, right = tally.keys()
            roles = assign(left, right, given, settings)
            _write_sets(out, kept_rows, rejected, roles, given, settings, tally, any(f.has_attribution for f in facts.values()))
    except OSError as error:
        raise DataError(f"cannot write in {out}: {error.strerror}.") from error
    finally:
        kept_rows.unlink(missing_ok=True)
    normaliser.save(out / "normalisation.json")
    leak = leaked_rows(out, settings.columns, processes)
    if any(leak.values()):
        raise AssertionError(f"rows of the held-out sets share a sentence with train: {leak}")
    report = _report(facts, tally, roles, given, settings) | {"leak": leak}
    write_lines(out / "report.json", [json.dumps(report, ensure_ascii=False, indent=1)])
    return report


def _han_sides(facts: Mapping[str, Facts]) -> tuple[bool, bool]:
    (first, one), *others = facts.items()
    for name, fact in others:
        if fact.han != one.han:
            raise DataError(
                f"sources {first} and {name} have Han characters in different columns; each source needs its columns "
                "in the order of clean.columns."
            )
    return one.han


# ── one chunk, in any process ───────────────────────────────────────────────────────────────────────────────────────


class Cleaned(NamedTuple):
    """What became of a chunk: blocks of text ready to be written, keys of the kept rows, and counts."""

    source: int
    kept: bytes
    rejected: bytes
    left: bytes
    right: bytes
    counts: Counter[str]
    samples: dict[str, list[list[str]]]


def clean_chunk(chunk: Chunk, settings: CleanConfig, normaliser: Normaliser, names: tuple[str, ...]) -> Cleaned:
    """Normalise, mend and judge each row."""
    one, two = settings.columns
    han = (normaliser.han[one], normaliser.han[two])
    kept, rejected, counts = [], [], Counter[str]()
    left, right = array("Q"), array("Q")
    samples: dict[str, list[list[str]]] = {}
    for row in rows(chunk, settings.encoding):
        counts["input"] += 1
        counts["attributed"] += bool(row.attribution)
        reason = row.fault
        sides = ("", "")
        if not reason:
            sides = (normaliser(row.left, one), normaliser(row.right, two))
            mended = mend(*sides)
            if mended != sides:
                counts["mended"] += 1
                sides = (normaliser(mended[0], one), normaliser(mended[1], two))
            reason = first_objection(Pair(sides, han, (row.left, row.right)), settings)
        if reason:
            counts[f"dropped {reason}"] += 1
            rejected.append(_tabbed(reason, names[chunk.source], str(row.number), row.left, row.right))
            if len(samples.setdefault(reason, [])) < SAMPLES:
                samples[reason].append(_sample(names[chunk.source], row.number, row.left, row.right))
            continue
        counts[f"changed {one}"] += sides[0] != row.left
        counts[f"changed {two}"] += sides[1] != row.right
        for text, is_han in zip((row.left, row.right), han, strict=True):
            if is_han:
                counts[f"script {script_of(text)}"] += 1
        left.append(hash_key(0, sentence_key(sides[0])))
        right.append(hash_key(1, sentence_key(sides[1])))
        kept.append(_tabbed(str(chunk.source), str(row.number), *sides, row.attribution))
    return Cleaned(
        chunk.source, b"".join(kept), b"".join(rejected), left.tobytes(), right.tobytes(), counts, samples
    )


def _tabbed(*fields: str) -> bytes:
    return "\t".join(text.replace("\t", " ") for text in fields).encode("utf-8", "replace") + b"\n"


def _sample(source: str, number: int, *sides: str) -> list[str]:
    return [f"{source}:{number}", *(text[:SAMPLE_CHARACTERS] for text in sides)]


@dataclass
class Tally:
    """Counts by source, sample rows by reason, and the keys of the rows that no rule objected to."""

    names: list[str]
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    samples: dict[str, list[list[str]]] = field(default_factory=dict)
    _left: array[int] = field(default_factory=lambda: array("Q"))
    _right: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, found: Cleaned, kept: BinaryIO, rejected: BinaryIO) -> None:
        kept.write(found.kept)
        rejected.write(found.rejected)
        self._left.frombytes(found.left)
        self._right.frombytes(found.right)
        self.counts.setdefault(self.names[found.source], Counter()).update(found.counts)
        for reason, rows in found.samples.items():
            for row in rows:
                self.show(reason, row)

    def show(self, reason: str, row: list[str]) -> None:
        shown = self.samples.setdefault(reason, [])
        if len(shown) < SAMPLES:
            shown.append(row)

    def keys(self) -> tuple[Keys, Keys]:
        return np.frombuffer(self._left, dtype=np.uint64), np.frombuffer(self._right, dtype=np.uint64)

    def total(self) -> Counter[str]:
        return sum(self.counts.values(), Counter())


# ── what each kept row is for ───────────────────────────────────────────────────────────────────────────────────────

TRAIN, DUPLICATE, HELD_OUT, REFERENCE, DEV, TEST = range(6)


@dataclass(frozen=True)
class Roles:
    """The role of each row, the rows of the sets made here in their order, and the further references of each."""

    role: NDArray[np.int8]
    sets: dict[str, list[int]]
    further: dict[int, tuple[list[int], list[int]]]
    """For a row of a set: rows with another left side for its right one, and with another right side for its left."""
    groups: int
    largest_group: int
    random_leak: tuple[float, float, float]


def assign(left: Keys, right: Keys, given: Mapping[str, GivenSet], settings: CleanConfig) -> Roles:
    """Duplicates out, then rows that a given set has a sentence of; else dev and test by whole groups."""
    role = np.full(len(left), TRAIN, dtype=np.int8)
    role[~first_of_equal(left, right)] = DUPLICATE
    if given:
        held = [np.concatenate([part.keys[side] for part in given.values()]) for side in (0, 1)]
        role[(role == TRAIN) & (np.isin(left, held[0]) | np.isin(right, held[1]))] = HELD_OUT
        if not (role == TRAIN).any():
            raise DataError("no pair is left to train on: every one shares a sentence with clean.dev or clean.test.")
        return Roles(role, {}, {}, 0, 0, (0.0, 0.0, 0.0))
    unique = np.flatnonzero(role == TRAIN)
    if not len(unique):
        raise DataError("no pair is left to train on; rejected.tsv would say why: look at the files and clean's settings.")
    a, b = left[unique], right[unique]
    split = split_groups(a, b, settings.test_size, settings.dev_size, settings.seed)
    role[unique[split.held]] = REFERENCE
    further: dict[int, tuple[list[int], list[int]]] = {}
    held = np.flatnonzero(split.held)
    for name, members in (("dev", split.dev), ("test", split.test)):
        role[unique[members]] = DEV if name == "dev" else TEST
    members_of: dict[int, list[int]] = {}
    for row in held.tolist():
        members_of.setdefault(int(split.groups[row]), []).append(row)
    for row in (*split.dev.tolist(), *split.test.tolist()):
        others = [other for other in members_of[int(split.groups[row])] if other != row]
        further[int(unique[row])] = (
            [int(unique[other]) for other in others if b[other] == b[row]],
            [int(unique[other]) for other in others if a[other] == a[row]],
        )
    sizes = np.bincount(split.groups)
    return Roles(
        role,
        {"dev": unique[split.dev].tolist(), "test": unique[split.test].tolist()},
        further,
        len(sizes),
        int(sizes.max()),
        random_leak(a, b, settings.dev_size + settings.test_size, settings.seed),
    )


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Kept(NamedTuple):
    source: int
    number: int
    sides: tuple[str, str]
    attribution: str


def _kept_rows(path: Path) -> Iterator[Kept]:
    with open(path, "rb") as stream:
        for raw in stream:
            source, number, left, right, attribution = raw.decode().removesuffix("\n").split("\t")
            yield Kept(int(source), int(number), (left, right), attribution)


def _write_sets(
    out: Path,
    kept_rows: Path,
    rejected: BinaryIO,
    roles: Roles,
    given: Mapping[str, GivenSet],
    settings: CleanConfig,
    tally: Tally,
    with_attribution: bool,
) -> None:
    ...
