"""How a text file is laid out: whether it is plain text at all, how many columns it has, and whether cells are quoted.

A source is tab-separated without quoting, two columns or three, all rows alike; here is how one shows that it isn't.
"""

import csv
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nmt.corpus.script import has_han

TAB = "\t"

MOST_COLUMNS = 8
"""Columns that are looked at; further ones are counted."""

LEAST_SHARE = 0.5
"""Of the lines, for what is said of a whole column."""

FEWEST = 20
"""Cells that are enough to say that all of them are in quotes."""

FEW = 0.1
"""Share of odd lines that may be mistakes; more of them are another way of writing."""

_FORMATS = (
    (rb"(?i)(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)?(?:<!doctype tmx[^>]*>\s*)?<tmx\b",
     "a TMX file (a translation memory)", "export it as tab-separated text"),
    (rb"(?i)(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)?(?:<!doctype html\b|<html\b)", "a web page",
     "look at it in a browser"),
    (rb"(?i)(?:\xef\xbb\xbf)?\s*<!doctype\b", "a web page", "look at it in a browser"),
    (rb"(?i)(?:\xef\xbb\xbf)?\s*<\?xml\b", "an XML file", "export it as tab-separated text"),
    (rb"\x1f\x8b", "packed with gzip", "unpack it (gunzip)"),
    (rb"BZh[1-9]", "packed with bzip2", "unpack it (bunzip2)"),
    (rb"\xfd7zXZ\0", "packed with xz", "unpack it (unxz)"),
    (rb"\x28\xb5\x2f\xfd", "packed with zstd", "unpack it (unzstd)"),
    (rb"PK\x03\x04", "a zip archive", "unpack it (unzip)"),
    (rb"%PDF-", "a PDF", "export its text"),
    (rb"PAR1", "a Parquet file", "export it as tab-separated text"),
)  # fmt: skip


def foreign_format(start: bytes) -> tuple[str, str] | None:
    """What a file is that begins like this, and what to do with it; None where nothing speaks against text."""
    for pattern, what, advice in _FORMATS:
        if re.match(pattern, start, re.DOTALL):
            return what, advice
    return None


def cells_of(text: str, columns: int) -> list[str] | None:
    """The cells of a line of a source that has so many columns, two or three; None if it is no row of it.

    Empty cells at the end say nothing. A third column, which names whom to credit, may be missing in a row.
    """
    cells = text.split(TAB)
    while len(cells) > 2 and not cells[-1].strip():
        cells.pop()
    return cells if 2 <= len(cells) <= columns else None


class Layout:
    """What the lines of a source, or some of them, say about its columns."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self.lines = 0
        self.without_tab: list[str] = []
        """The first lines that have one cell."""
        self._wide: Counter[int] = Counter()
        """Lines with at least so many cells."""
        self._filled: Counter[int] = Counter()
        """Lines with at least so many cells when empty ones at the end don't count."""
        self._han: Counter[int] = Counter()
        self._size: Counter[int] = Counter()
        """Characters of each column."""
        self._cells = 0
        self._quotes: Counter[str] = Counter()
        """Of cells with a quote: those `quoted` as a whole, those of them with `doubled` ones inside, and `others`."""
        self._latest: Counter[str] = Counter()
        """The same of the latest FEWEST of them or fewer."""
        self.has_quoted_part = False
        """Whether FEWEST cells with quotes, one after another, are quoted as in CSV."""
        for line in lines:
            if line.strip():
                self.add(line.split(TAB))

    def add(self, cells: Sequence[str]) -> None:
        """Takes a line that is not blank."""
        last = max((i for i, cell in enumerate(cells, 1) if cell.strip()), default=0)
        self.lines += 1
        if len(cells) == 1 and len(self.without_tab) < FEWEST:
            self.without_tab += cells
        self._wide.update(range(1, min(len(cells), MOST_COLUMNS + 1) + 1))
        self._filled.update(range(1, min(last, MOST_COLUMNS + 1) + 1))
        for column, cell in enumerate(cells[:MOST_COLUMNS], 1):
            self._han[column] += has_han(cell)
            self._size[column] += len(cell)
            self._cells += bool(cell.strip())
        self.add_quotes(cells)

    def add_quotes(self, cells: Sequence[str]) -> None:
        """Takes of a line only whether its cells are quoted as CSV has it: in quotes, and a quote inside doubled."""
        for cell in cells:
            cell = cell.strip()
            if '"' in cell:
                if _CSV_CELL.fullmatch(cell):
                    kinds = ["quoted", "doubled"] if '""' in cell[1:-1] else ["quoted"]
                else:
                    kinds = [] if _PART_OF_CSV_CELL.fullmatch(cell) else ["others"]
                self._quotes.update(kinds)
                self._latest.update(kinds)
                if self._latest["quoted"] + self._latest["others"] >= FEWEST:
                    # So a part that came out of a spreadsheet shows in a long file without quoting.
                    self.has_quoted_part |= _are_doubled(self._latest)
                    self._latest.clear()

    @property
    def columns(self) -> int:
        """Columns that most lines have; of two, three where most lines have a third cell and some say something in it.

        So a table that is padded with TABs has two, and a column of credits may be mostly empty.
        """
        filled = max((n for n, lines in self._filled.items() if lines >= LEAST_SHARE * self.lines), default=0)
        credits_some = self._wide[3] >= LEAST_SHARE * self.lines and self._filled[3] > 0.01 * self.lines
        return 3 if filled == 2 and credits_some else filled

    @property
    def with_third(self) -> float:
        """Share of the lines that have something in a third cell."""
        return self._filled[3] / max(1, self.lines)

    def share_of_han(self, column: int) -> float:
        """Share of the lines that have this column, from 1, with a Han character in it."""
        return self._han[column] / max(1, self._wide[column])

    def han_columns(self) -> list[int]:
        """The columns, from 1, where most lines have a Han character."""
        usual = [column for column in sorted(self._size) if self._wide[column] >= LEAST_SHARE * self.lines]
        return [column for column in usual if self.share_of_han(column) >= LEAST_SHARE]

    def longest_without_han(self) -> int:
        """The column, from 1, with most text among those without Han characters; 0 if all have them."""
        others = [column for column in self._size if column not in self.han_columns()]
        return max(others, key=lambda column: self._size[column], default=0)

    @property
    def is_quoted(self) -> bool:
        """Whether cells are quoted as in CSV: quotes are doubled inside quoted cells, or all cells are quoted.

        In plain text nearly every quotation is a part of its cell, or has others beside it: "Yes," he said, "I know."
        """
        all_quoted = self._cells >= FEWEST and self._quotes["quoted"] >= (1 - FEW) * self._cells
        return _are_doubled(self._quotes) or (all_quoted and not self._quotes["others"])


def _are_doubled(quotes: Mapping[str, int]) -> bool:
    few_others = quotes["others"] <= FEW * (quotes["quoted"] + quotes["others"])
    return quotes["doubled"] > 0 and few_others


_CSV_CELL = re.compile(r'"(?:[^"]++|"")*+"')
_PART_OF_CSV_CELL = re.compile(r'"?(?:[^"]++|"")*+"?')
"""What a TAB or a line end inside a quoted cell leaves on either side; it says nothing."""


def is_separated_by(lines: Sequence[str]) -> str:
    """The mark, comma or semicolon, by which these lines have two or three columns each; empty if there is none."""
    for mark in ",;":
        try:
            rows = list(csv.reader((line for line in lines if line.strip()), delimiter=mark))
        except csv.Error:
            continue
        if rows and sum(len(row) in (2, 3) for row in rows) >= (1 - FEW) * len(rows):
            return mark
    return ""


def how_to_unquote(path: str | Path, separator: str = "\t") -> str:
    """The command that makes plain tab-separated text of a file with CSV quoting."""
    option = {"\t": '"\\t"'}.get(separator, f'"{separator}"')
    program = (
        'import csv, sys; [print(*(" ".join(cell.split()) for cell in row), sep="\\t") '
        f"for row in csv.reader(sys.stdin, delimiter={option})]"
    )
    return f"python3 -c '{program}' < {shlex.quote(str(path))} > NEW.tsv"
