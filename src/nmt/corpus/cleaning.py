"""From raw files to clean, split text: `clean_corpus` is the stage, the rest are its steps.

Rows stream through twice: once from the sources, normalised and judged, into one file of kept rows; once from there
into the sets. What stays in memory for each row is three 64-bit keys and its role.
"""

import functools
import hashlib
import importlib.metadata
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from nmt.config import CleanConfig, to_dict
from nmt.corpus.clean_report import given_warnings, reasons
from nmt.corpus.guard import leaks, normalised_and_repaired
from nmt.corpus.keys import LEFT, PAIR, RIGHT, duplicate_key, hash_key, leak_key
from nmt.corpus.normalise import Normaliser
from nmt.corpus.parallel import Workers, worker_count
from nmt.corpus.reading import Chunk, Facts, Sources, chunks, inspect, rows
from nmt.corpus.rules import RULES, Pair, first_rejection
from nmt.corpus.script import script_of
from nmt.corpus.sets import HELD_OUT, SET_ASIDE, TRAIN, GivenSet, Roles, assign, read_given, reference_form, write_sets
from nmt.corpus.splitting import Keys
from nmt.errors import DataError, describe_error
from nmt.io import write_lines

log = logging.getLogger(__name__)

KEPT, REJECTED = "kept.part", "rejected.tsv"

SAMPLES = 5
"""Rows shown for each reason in the report."""
SAMPLE_CHARACTERS = 120


class NothingLeft(DataError):
    """Too few rows are left for the sets; `rejected.tsv` in the output folder has those that were dropped."""


def clean_corpus(sources: Sources, settings: CleanConfig, out: Path, workers: int | None = None) -> dict[str, Any]:
    """Clean and split `sources` into the empty folder `out`; returns the report, which is also in `report.json`.

    The files are the same for any number of workers.
    """
    facts = {name: inspect(files, settings) for name, files in sources.items()}
    normaliser = Normaliser(settings.zh_script, dict(zip(settings.columns, _han_sides(facts), strict=True)))
    given = {
        part: read_given(part, tuple(map(Path, files)), normaliser)
        for part, files in (("dev", settings.dev), ("test", settings.test))
        if files
    }
    size = sum(file["bytes"] for fact in facts.values() for file in fact.files)
    try:
        with Workers(worker_count(size, workers)) as pool:
            tally = _clean_rows(sources, facts, settings, normaliser, out, pool)
            roles = _assign(tally, given, settings)
            _write(out, roles, given, settings, tally, any(fact.has_attribution for fact in facts.values()))
            if not roles.count(TRAIN):
                raise NothingLeft(f"no pair is left to train on. {reasons(tally.total())}")
            normaliser.save(out / "normalisation.json")
            leak = leaks(out, normaliser, pool)
    except OSError as error:
        raise DataError(f"cannot write {describe_error(error, error.filename or out)}.") from error
    if leak["dev"] or leak["test"] or (leak["between"] and not given):
        raise AssertionError(f"held-out rows share a sentence: {leak}")
    report = _report(facts, tally, roles, given, settings, normaliser, leak)
    for line in given_warnings(report):
        log.warning("%s", line)
    write_lines(out / "report.json", [json.dumps(report, ensure_ascii=False, indent=1)])
    return report


def _assign(tally: "CleanStats", given: Mapping[str, GivenSet], settings: CleanConfig) -> Roles:
    left, right, pair = tally.keys()
    dropped = reasons(tally.total())
    if not len(pair):
        raise NothingLeft(f"no pair is left to train on. {dropped}")
    try:
        return assign(left, right, pair, given, settings)
    except DataError as error:
        if not dropped:
            raise
        raise NothingLeft(f"{error} {dropped}") from error


def _unchanged(sources: Sources, facts: Mapping[str, Facts]) -> Iterator[Chunk]:
    """All lines of all sources, in chunks; raises DataError when they are not the bytes that `inspect` saw."""
    for source, (name, files) in enumerate(sources.items()):
        digests = [hashlib.sha256() for _ in files]
        where = " or ".join(map(str, files))
        changed = DataError(f"{where} changed while it was being cleaned; run it again when nothing writes to it.")
        try:
            for chunk in chunks([files], [facts[name].columns]):
                for digest, lines in zip(digests, zip(*chunk.lines, strict=True), strict=True):
                    digest.update(b"".join(lines))
                yield chunk._replace(source=source)
        except ValueError as error:  # One of two aligned files ended before the other.
            raise changed from error
        if [digest.hexdigest() for digest in digests] != [file["sha256"] for file in facts[name].files]:
            raise changed


def _clean_rows(
    sources: Sources,
    facts: Mapping[str, Facts],
    settings: CleanConfig,
    normaliser: Normaliser,
    out: Path,
    pool: Workers,
) -> "CleanStats":
    """All rows of all sources into `out`: those that no rule objects to, and `rejected.tsv` with the others."""
    tally = CleanStats(list(sources))
    cleaner = functools.partial(clean_chunk, settings=settings, normaliser=normaliser, names=tuple(sources))
    with open(out / KEPT, "wb") as kept, open(out / REJECTED, "wb") as rejected:
        rejected.write(_tabbed("reason", "source", "line", *settings.columns))
        bar = tqdm(
            total=sum(fact.rows for fact in facts.values()), desc="clean", unit=" rows", disable=None, leave=False
        )
        with bar:
            for found in pool.map(cleaner, _unchanged(sources, facts)):
                tally.add(found, kept, rejected)
                bar.update(found.counts["input"])
    return tally


def _write(
    out: Path,
    roles: Roles,
    given: Mapping[str, GivenSet],
    settings: CleanConfig,
    tally: "CleanStats",
    attribution: bool,
) -> None:
    """Kept rows into the sets; those that the whole corpus leaves no place for after the others in `rejected.tsv`."""
    with open(out / REJECTED, "ab") as rejected:
        for row, reason in write_sets(out, out / KEPT, roles, given, settings.columns, attribution):
            name = tally.names[row.source]
            rejected.write(_tabbed(reason, name, str(row.number), *row.sides))
            tally.counts[name][f"dropped {reason}"] += 1
            tally.show(reason, _sample(name, row.number, *row.sides))
    (out / KEPT).unlink()


def _han_sides(facts: Mapping[str, Facts]) -> tuple[bool, bool]:
    (first, one), *others = facts.items()
    for name, fact in others:
        if fact.han != one.han:
            raise DataError(
                f"sources {first} and {name} have Han characters in different columns; each source needs its columns "
                "in the order of clean.columns."
            )
    return one.han


# ── one chunk, in any process ─────────────────────────────────────────────────────────────────────────────────────────


class Cleaned(NamedTuple):
    """What became of a chunk: blocks of text ready to be written, keys of the kept rows, and counts."""

    source: int
    kept: bytes
    rejected: bytes
    keys: tuple[bytes, bytes, bytes]
    """Hashed leak keys of the left and of the right sides, and duplicate keys."""
    counts: Counter[str]
    samples: dict[str, list[list[str]]]


def clean_chunk(chunk: Chunk, settings: CleanConfig, normaliser: Normaliser, names: tuple[str, ...]) -> Cleaned:
    """Normalise, repair and filter each row."""
    one, two = settings.columns
    han = (normaliser.han[one], normaliser.han[two])
    kept, rejected, counts = [], [], Counter[str]()
    keys = array("Q"), array("Q"), array("Q")
    samples: dict[str, list[list[str]]] = {}
    for row in rows(chunk, settings.encoding):
        counts["input"] += 1
        counts["attributed"] += bool(row.attribution)
        reason = row.fault
        sides = ("", "")
        if not reason:
            normal, sides = normalised_and_repaired((row.left, row.right), normaliser)
            counts["repaired"] += sides != normal
            reason = first_rejection(Pair(sides, han, (row.left, row.right)), settings)
        if reason:
            counts[f"dropped {reason}"] += 1
            rejected.append(_tabbed(reason, names[chunk.source], str(row.number), row.left, row.right))
            if len(samples.setdefault(reason, [])) < SAMPLES:
                samples[reason].append(_sample(names[chunk.source], row.number, row.left, row.right))
            continue
        counts[f"changed {one}"] += sides[0] != row.left
        counts[f"changed {two}"] += sides[1] != row.right
        for text, lang in zip((row.left, row.right), settings.columns, strict=True):
            if normaliser.is_chinese(lang):
                counts[f"script {script_of(text)}"] += 1
        keys[LEFT].append(hash_key(LEFT, leak_key(sides[0])))
        keys[RIGHT].append(hash_key(RIGHT, leak_key(sides[1])))
        keys[PAIR].append(hash_key(PAIR, duplicate_key(*sides)))
        kept.append(_tabbed(str(chunk.source), str(row.number), *sides, row.attribution))
    left, right, pair = (found.tobytes() for found in keys)
    return Cleaned(chunk.source, b"".join(kept), b"".join(rejected), (left, right, pair), counts, samples)


def _tabbed(*fields: str) -> bytes:
    # Some encodings (UTF-7) can spell a line feed inside a line.
    return "\t".join(text.translate(_SPACES) for text in fields).encode("utf-8", "replace") + b"\n"


_SPACES = str.maketrans("\t\n", "  ")


def _sample(source: str, number: int, *sides: str) -> list[str]:
    return [f"{source}:{number}", *(text[:SAMPLE_CHARACTERS] for text in sides)]


@dataclass
class CleanStats:
    """Counts by source, sample rows by reason, and the keys of the rows that no rule objected to."""

    names: list[str]
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    samples: dict[str, list[list[str]]] = field(default_factory=dict)
    _keys: "tuple[array[int], array[int], array[int]]" = field(
        default_factory=lambda: (array("Q"), array("Q"), array("Q"))
    )

    def add(self, found: Cleaned, kept: BinaryIO, rejected: BinaryIO) -> None:
        kept.write(found.kept)
        rejected.write(found.rejected)
        for keys, more in zip(self._keys, found.keys, strict=True):
            keys.frombytes(more)
        self.counts.setdefault(self.names[found.source], Counter()).update(found.counts)
        for reason, shown in found.samples.items():
            for row in shown:
                self.show(reason, row)

    def show(self, reason: str, row: list[str]) -> None:
        shown = self.samples.setdefault(reason, [])
        if len(shown) < SAMPLES:
            shown.append(row)

    def keys(self) -> tuple[Keys, Keys, Keys]:
        left, right, pair = (np.frombuffer(keys, dtype=np.uint64) for keys in self._keys)
        return left, right, pair

    def total(self) -> Counter[str]:
        return sum(self.counts.values(), Counter())


# ── the report ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _report(
    facts: Mapping[str, Facts],
    tally: CleanStats,
    roles: Roles,
    given: Mapping[str, GivenSet],
    settings: CleanConfig,
    normaliser: Normaliser,
    leak: dict[str, int],
) -> dict[str, Any]:
    """What went in, what became of it and why; input = dropped + kept, and kept = the sets + further references."""
    total = tally.total()
    dropped = _dropped(total)
    return {
        "format": 1,
        "settings": {key: value for key, value in to_dict(settings).items() if key not in ("sources", "dev", "test")},
        "opencc": importlib.metadata.version("opencc"),
        "sources": {
            name: {
                "files": fact.files,
                "input": tally.counts[name]["input"],
                "attributed": tally.counts[name]["attributed"],
                "undecodable_lines": fact.bad,
                "dropped": _dropped(tally.counts[name]),
                "kept": tally.counts[name]["input"] - sum(_dropped(tally.counts[name]).values()),
            }
            for name, fact in facts.items()
        },
        "input": total["input"],
        "changed": {lang: total[f"changed {lang}"] for lang in settings.columns},
        "repaired": total["repaired"],
        "zh_script": {lang: normaliser.policy(lang) for lang in settings.columns if normaliser.is_chinese(lang)},
        "script": {kind: total[f"script {kind}"] for kind in ("simplified", "traditional", "mixed", "neutral")},
        "dropped": {reason: {"rows": n, "samples": tally.samples[reason]} for reason, n in dropped.items()},
        "kept": total["input"] - sum(dropped.values()),
        # Those set aside that turned out to be none were dropped like the rows held out for given sets.
        "further_references": roles.count(SET_ASIDE, HELD_OUT) - total["dropped held_out"],
        "sets": {
            "train": roles.count(TRAIN),
            **{part: len(given[part].rows) if given else len(roles.sets[part]) for part in ("dev", "test")},
        },
        "split": None
        if given
        else {
            "groups": roles.groups,
            "largest_group": roles.largest_group,
            "random_leak": dict(zip((*settings.columns, "either"), roles.random_leak, strict=True)),
        },
        "given": {part: found.files for part, found in given.items()},
        "reference_form": reference_form(given, normaliser),
        "han": dict(normaliser.han),
        "leak": leak,
    }


def _dropped(counts: Counter[str]) -> dict[str, int]:
    """Rows by reason: reading faults, the rules in their order, then what only the whole corpus can tell."""
    reasons = ("undecodable", "columns", *(rule.name for rule in RULES), "duplicate", "held_out")
    return {reason: counts[f"dropped {reason}"] for reason in reasons if counts[f"dropped {reason}"]}
