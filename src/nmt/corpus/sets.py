"""Train, dev and test: the sets given as files, what each kept row is for, and the files of every set."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nmt.config import CleanConfig
from nmt.corpus.guard import Forms, held_out_keys
from nmt.corpus.keys import LEFT, RIGHT, reference_key
from nmt.corpus.layout import TAB, Layout, cells_of
from nmt.corpus.normalise import Normaliser
from nmt.corpus.reading import check_layout
from nmt.corpus.script import is_han_side, simplify
from nmt.corpus.splitting import Keys, first_of_equal, random_leak, split_groups
from nmt.errors import DataError, counted
from nmt.io import read_aligned, sha256_of, write_lines

HELD_OUT_SETS = ("dev", "test")
Columns = tuple[str, ...]


class Kept(NamedTuple):
    """A row that no rule objected to: its source and line, both sides normalised, its attribution."""

    source: int
    number: int
    sides: tuple[str, str]
    attribution: str


# ── sets given as files ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class GivenSet:
    """A dev or test set whose files are the truth: its text is never altered."""

    rows: list[Kept]
    keys: tuple[Forms, Forms]
    """Leak keys of each side, in all forms that the guard compares."""
    files: list[dict[str, str | int]]


def read_given(name: str, files: tuple[Path, ...], normaliser: Normaliser) -> GivenSet:
    """The rows of one tab-separated or two line-aligned UTF-8 files; raises DataError where a row isn't one."""
    columns = tuple(normaliser.han)
    hashes = _hashes(files)
    where = " and ".join(map(str, files))
    found = read_aligned(*files)
    if not found:
        raise DataError(f"clean.{name}: {where} {'are' if len(files) == 2 else 'is'} empty.")
    layouts = [Layout(column) for column in zip(*found, strict=True)]
    check_layout(files, layouts)
    if len(files) == 1:
        cells = [cells_of(line, layouts[0].columns) for (line,) in found]
        if None in cells:
            odd = cells.index(None)
            there = counted(found[odd][0].count(TAB) + 1, "column")
            raise DataError(
                f"clean.{name}: {where}, line {odd + 1} has {there}, most lines have {layouts[0].columns}; "
                "a held-out set is taken as it is, so correct the file."
            )
        found = [tuple(row) for row in cells if row]
    blank = next((number for number, row in enumerate(found, 1) if not (row[0].strip() and row[1].strip())), None)
    if blank:
        raise DataError(
            f"clean.{name}: {where}, line {blank} has a side without text, which can be neither translated nor "
            "matched; a held-out set is taken as it is, so take the line out."
        )
    if tuple(is_han_side(row[side] for row in found) for side in (0, 1)) != tuple(normaliser.han.values()):
        raise DataError(
            f"clean.{name}: the Chinese of {where} is not in the column where the sources have theirs; give the "
            f"columns in the order of clean.columns ({', '.join(columns)})."
        )
    rows = [Kept(0, number, (row[0], row[1]), row[2] if len(row) == 3 else "") for number, row in enumerate(found, 1)]
    if hashes != _hashes(files):
        raise DataError(f"clean.{name}: {where} changed while it was read; run it again when nothing writes to it.")
    return GivenSet(
        rows,
        held_out_keys([row.sides for row in rows], normaliser),
        [{"file": path.name, "sha256": sha256, "lines": len(rows)} for path, sha256 in zip(files, hashes, strict=True)],
    )


def reference_form(given: Mapping[str, GivenSet], normaliser: Normaliser) -> dict[str, dict[str, dict[str, Any]]]:
    """For each given set and language with lines that `clean` would write otherwise: how many, and what that costs.

    The text is never altered, so a model that writes as its training text does can't match these lines: `bleu` is that
    of the lines in the form of the training text against the lines as they are.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in given}
    for name, part in given.items():
        for side, lang in enumerate(normaliser.han):
            texts = [row.sides[side] for row in part.rows]
            learnt = [normaliser(text, lang) for text in texts]
            if normaliser.zh_script == "filter" and normaliser.is_chinese(lang):
                learnt = list(map(simplify, learnt))  # Nothing Traditional is left to be learnt from.
            changed = sum(one != other for one, other in zip(texts, learnt, strict=True))
            if changed:
                from nmt.evaluation.metrics import (
                    bleu,  # Here, since it loads sacrebleu, which most corpora can do without.
                )

                best = bleu(learnt, [[text] for text in texts], lang)
                found[name][lang] = {
                    "lines": changed,
                    "share": changed / len(texts),
                    "bleu": best.value,
                    "signature": best.signature,
                }
    return found


def _hashes(files: Sequence[Path]) -> list[str]:
    try:
        return [sha256_of(path) for path in files]
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}.") from error


# ── what each kept row is for ─────────────────────────────────────────────────────────────────────────────────────────

TRAIN, DUPLICATE, HELD_OUT, SET_ASIDE, DEV, TEST = range(6)
"""A row that is set aside is in a group of dev or test: a further reference, or of no use."""


@dataclass(frozen=True)
class Roles:
    """What each kept row is for; of a split made here also its sets, in their order, and how it was made."""

    role: NDArray[np.int8]
    sets: dict[str, list[int]]
    groups: int
    largest_group: int
    random_leak: tuple[float, float, float]
    """Shares that a row-by-row split would have leaked: see `random_leak`."""

    def count(self, *roles: int) -> int:
        return int(np.count_nonzero(np.isin(self.role, roles)))


def assign(left: Keys, right: Keys, pair: Keys, given: Mapping[str, GivenSet], settings: CleanConfig) -> Roles:
    """Duplicates out, then rows with a sentence of a given set; without given sets, dev and test by whole groups.

    `left` and `right` are leak keys, `pair` duplicate keys, all hashed.
    """
    role = np.full(len(left), TRAIN, dtype=np.int8)
    role[~first_of_equal(pair)] = DUPLICATE
    if given:
        held = [np.concatenate([part.keys[side].ravel() for part in given.values()]) for side in (LEFT, RIGHT)]
        role[(role == TRAIN) & (np.isin(left, held[LEFT]) | np.isin(right, held[RIGHT]))] = HELD_OUT
        return Roles(role, {}, 0, 0, (0.0, 0.0, 0.0))
    unique = np.flatnonzero(role == TRAIN)
    a, b = left[unique], right[unique]
    split = split_groups(a, b, settings.test_size, settings.dev_size, settings.seed)
    role[unique[split.held]] = SET_ASIDE
    role[unique[split.dev]], role[unique[split.test]] = DEV, TEST
    sizes = np.bincount(split.groups)
    return Roles(
        role,
        {"dev": unique[split.dev].tolist(), "test": unique[split.test].tolist()},
        len(sizes),
        int(sizes.max(initial=0)),
        random_leak(a, b, settings.dev_size + settings.test_size),
    )


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def kept_rows(path: Path) -> Iterator[Kept]:
    with open(path, "rb") as stream:
        for raw in stream:
            source, number, left, right, attribution = raw.decode().removesuffix("\n").split("\t")
            yield Kept(int(source), int(number), (left, right), attribution)


def write_sets(
    out: Path, kept: Path, roles: Roles, given: Mapping[str, GivenSet], columns: Columns, with_attribution: bool
) -> Iterator[tuple[Kept, Literal["duplicate", "held_out"]]]:
    """Write the files of every set; yields each row that is in none, with the reason."""
    aside: dict[int, Kept] = {}
    endings = (*columns, "attribution") if with_attribution else columns
    with ExitStack() as stack:
        train = [stack.enter_context(open(out / f"train.{ending}", "wb")) for ending in endings]
        for index, row in enumerate(kept_rows(kept)):
            role = roles.role[index]
            if role == TRAIN:
                for stream, text in zip(train, (*row.sides, row.attribution), strict=False):
                    stream.write(text.encode() + b"\n")
            elif role == DUPLICATE:
                yield row, "duplicate"
            elif role == HELD_OUT:
                yield row, "held_out"
            else:
                aside[index] = row
    used: set[int] = set()
    for name in HELD_OUT_SETS:
        if given:
            _write_held_out(out, name, range(len(given[name].rows)), dict(enumerate(given[name].rows)), columns)
        else:
            used |= _write_held_out(out, name, roles.sets[name], aside, columns)
    for index, row in aside.items():
        if index not in used:
            yield row, "held_out"


def _write_held_out(
    out: Path, name: str, members: Sequence[int], rows: Mapping[int, Kept], columns: Columns
) -> set[int]:
    """The set's files in the order of `members`, with all references among `rows`; returns which rows are in them.

    The references of a line are its own text first, then that of the rows whose other side has the same reference
    key. Files of attributions have a field for each field of the text beside them.
    """
    used: set[int] = set()
    for side, lang in enumerate(columns):
        sharing: dict[str, list[int]] = {}
        for row in rows:
            sharing.setdefault(reference_key(rows[row].sides[1 - side]), []).append(row)
        references: list[dict[str, str]] = []
        for member in members:
            credited: dict[str, str] = {}
            for row in (member, *sharing[reference_key(rows[member].sides[1 - side])]):
                text = rows[row].sides[side].replace("\t", " ")
                credited[text] = credited.get(text) or rows[row].attribution
                used.add(row)
            references.append(credited)
        write_lines(out / f"{name}.{lang}", (rows[row].sides[side] for row in members))
        write_lines(out / f"{name}.refs.{lang}", ("\t".join(texts) for texts in references))
        if any(any(texts.values()) for texts in references):
            write_lines(out / f"{name}.refs.{lang}.attribution", ("\t".join(texts.values()) for texts in references))
    if any(rows[row].attribution for row in members):
        write_lines(out / f"{name}.attribution", (rows[row].attribution for row in members))
    return used
