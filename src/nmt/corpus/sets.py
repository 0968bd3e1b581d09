"""Train, dev and test: what each kept row is for, the sets given as files, and the written files checked for leaks."""

import functools
import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nmt.config import CleanConfig
from nmt.corpus.layout import TAB, Layout, cells_of
from nmt.corpus.normalise import Normaliser
from nmt.corpus.parallel import Workers
from nmt.corpus.reading import check_layout
from nmt.corpus.script import is_han_side
from nmt.corpus.splitting import Keys, first_of_equal, hash_key, random_leak, sentence_key, split_groups
from nmt.errors import DataError, counted
from nmt.text import lines_of, read_aligned, write_lines

HELD_OUT_SETS = ("dev", "test")
BLOCK_LINES = 5_000
Columns = tuple[str, ...]


class Kept(NamedTuple):
    """A row that no rule objected to: its source and line, both sides normalised, its attribution."""

    source: int
    number: int
    sides: tuple[str, str]
    attribution: str


# ── sets given as files ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class GivenSet:
    """A dev or test set whose files are the truth: its text is never altered."""

    rows: list[Kept]
    further: dict[int, tuple[list[int], list[int]]]
    """As in Roles, within the set itself."""
    keys: tuple[Keys, Keys]
    """Of each side, as found and normalised, so that the guard sees both."""
    files: list[dict[str, str | int]]


def read_given(name: str, files: tuple[Path, ...], normaliser: Normaliser) -> GivenSet:
    """The rows of one tab-separated or two line-aligned UTF-8 files; raises DataError where a row isn't one."""
    columns = tuple(normaliser.han)
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
                "a held-out set is taken as it is, so mend the file."
            )
        found = [tuple(row) for row in cells if row]
    if tuple(is_han_side(row[side] for row in found) for side in (0, 1)) != tuple(normaliser.han.values()):
        raise DataError(
            f"clean.{name}: the Chinese of {where} is not in the column where the sources have theirs; give the "
            f"columns in the order of clean.columns ({', '.join(columns)})."
        )
    rows = [Kept(0, number, (row[0], row[1]), row[2] if len(row) == 3 else "") for number, row in enumerate(found, 1)]
    as_found = [np.array([hash_key(side, sentence_key(row.sides[side])) for row in rows], np.uint64) for side in (0, 1)]
    normal = [
        np.array([hash_key(side, sentence_key(normaliser(row.sides[side], columns[side]))) for row in rows], np.uint64)
        for side in (0, 1)
    ]
    return GivenSet(
        rows,
        _further(range(len(rows)), range(len(rows)), *as_found),
        (np.concatenate([as_found[0], normal[0]]), np.concatenate([as_found[1], normal[1]])),
        [{"file": path.name, "sha256": _sha256(path), "lines": len(rows)} for path in files],
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _further(
    members: Iterable[int], pool: Iterable[int], left: Keys, right: Keys
) -> dict[int, tuple[list[int], list[int]]]:
    """For each member the other rows of the pool with its right sentence, and those with its left one."""
    by_key: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
    for row in pool:
        for rows_of, key in zip(by_key, (int(right[row]), int(left[row])), strict=True):
            rows_of.setdefault(key, []).append(row)
    return {
        row: (
            [other for other in by_key[0].get(int(right[row]), ()) if other != row],
            [other for other in by_key[1].get(int(left[row]), ()) if other != row],
        )
        for row in members
    }


# ── what each kept row is for ───────────────────────────────────────────────────────────────────────────────────────

TRAIN, DUPLICATE, HELD_OUT, REFERENCE, DEV, TEST = range(6)


@dataclass(frozen=True)
class Roles:
    """What each kept row is for; of a split made here also its sets, in their order, and how it was made."""

    role: NDArray[np.int8]
    sets: dict[str, list[int]]
    further: dict[int, tuple[list[int], list[int]]]
    """For a row of a set: other rows with its right sentence (their left sides are references too), and vice versa."""
    groups: int
    largest_group: int
    random_leak: tuple[float, float, float]
    """Shares that a row-by-row split would have leaked: see `random_leak`."""

    def count(self, role: int) -> int:
        return int(np.count_nonzero(self.role == role))


def assign(left: Keys, right: Keys, given: Mapping[str, GivenSet], settings: CleanConfig) -> Roles:
    """Duplicates out, then rows with a sentence of a given set; without given sets, dev and test by whole groups."""
    role = np.full(len(left), TRAIN, dtype=np.int8)
    role[~first_of_equal(left, right)] = DUPLICATE
    if given:
        held = [np.concatenate([part.keys[side] for part in given.values()]) for side in (0, 1)]
        role[(role == TRAIN) & (np.isin(left, held[0]) | np.isin(right, held[1]))] = HELD_OUT
        roles = Roles(role, {}, {}, 0, 0, (0.0, 0.0, 0.0))
    else:
        unique = np.flatnonzero(role == TRAIN)
        a, b = left[unique], right[unique]
        split = split_groups(a, b, settings.test_size, settings.dev_size, settings.seed)
        role[unique[split.held]] = REFERENCE
        role[unique[split.dev]], role[unique[split.test]] = DEV, TEST
        sets = {"dev": unique[split.dev].tolist(), "test": unique[split.test].tolist()}
        sizes = np.bincount(split.groups)
        roles = Roles(
            role,
            sets,
            _further([*sets["dev"], *sets["test"]], unique[split.held].tolist(), left, right),
            len(sizes),
            int(sizes.max(initial=0)),
            random_leak(a, b, settings.dev_size + settings.test_size, settings.seed),
        )
    if not roles.count(TRAIN):
        raise DataError(
            f"of {len(left):,} clean pairs none is left to train on"
            + (": every one shares a sentence with clean.dev or clean.test." if given else "; look at the sources.")
        )
    return roles


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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
            match roles.role[index]:
                case 0:  # TRAIN
                    for stream, text in zip(train, (*row.sides, row.attribution), strict=False):
                        stream.write(text.encode() + b"\n")
                case 1:  # DUPLICATE
                    yield row, "duplicate"
                case 2:  # HELD_OUT
                    yield row, "held_out"
                case _:
                    aside[index] = row
    for name in HELD_OUT_SETS:
        if given:
            _write_held_out(out, name, range(len(given[name].rows)), given[name].rows, given[name].further, columns)
        else:
            _write_held_out(out, name, roles.sets[name], aside, roles.further, columns)


def _write_held_out(
    out: Path,
    name: str,
    members: Iterable[int],
    rows: Mapping[int, Kept] | list[Kept],
    further: Mapping[int, tuple[list[int], list[int]]],
    columns: Columns,
) -> None:
    """The set's files in the order of `members`, and for each row and side all of its references, its own first."""
    members = list(members)
    for side, lang in enumerate(columns):
        write_lines(out / f"{name}.{lang}", (rows[row].sides[side] for row in members))
        references = (
            dict.fromkeys(rows[other].sides[side].replace("\t", " ") for other in (row, *further[row][side]))
            for row in members
        )
        write_lines(out / f"{name}.refs.{lang}", ("\t".join(texts) for texts in references))
    if any(rows[row].attribution for row in members):
        write_lines(out / f"{name}.attribution", (rows[row].attribution for row in members))


# ── checking what was written ───────────────────────────────────────────────────────────────────────────────────────


def leaks(out: Path, columns: Columns, pool: Workers) -> dict[str, int]:
    """Rows of the written dev and test that share a sentence of either side with train, and of test with dev."""
    keys: dict[tuple[str, int], Keys] = {}
    for name, side in itertools.product(("train", *HELD_OUT_SETS), (0, 1)):
        blocks = pool.map(functools.partial(_keys_of, side), _blocks(out / f"{name}.{columns[side]}"))
        keys[name, side] = np.frombuffer(b"".join(blocks), dtype=np.uint64)

    def shared(one: str, other: str) -> int:
        left, right = (np.isin(keys[one, side], keys[other, side]) for side in (0, 1))
        return int(np.count_nonzero(left | right))

    return {"dev": shared("dev", "train"), "test": shared("test", "train"), "between": shared("test", "dev")}


def _blocks(path: Path) -> Iterator[list[str]]:
    with open(path, "rb") as stream:
        lines = (text for text, _ in lines_of(stream))
        while block := list(itertools.islice(lines, BLOCK_LINES)):
            yield block


def _keys_of(side: int, lines: list[str]) -> bytes:
    return array("Q", (hash_key(side, sentence_key(line)) for line in lines)).tobytes()
