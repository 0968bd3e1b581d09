"""The files around translate and score: a file or stdin in, a file or stdout out, line by line."""

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from nmt.decoding.options import Counts, Options, PairScore, Translation
from nmt.decoding.translator import WINDOW, Translator
from nmt.errors import DataError, counted
from nmt.io import STANDARD, lines_of, read_aligned, read_lines, write_lines

log = logging.getLogger(__name__)

TOLD = 10
"""Lines of one fault that are named; further ones are only counted."""


def translate_file(
    translator: Translator,
    source: str | Path,
    out: str | Path,
    options: Options | None = None,
    *,
    table: bool = False,
    prefix_file: str | Path | None = None,
    window: int | None = None,
) -> Counts:
    """Translate `source` line by line into `out`, either of them `-` for stdin or stdout.

    With `table`, and with more than one translation of a line, `out` has columns: line, rank, score, text. A file is
    whole or not there; stdout has each line at once. `window` is 1 at a terminal, so that each line is answered.
    """
    options, counts = options or Options(), Counts()
    table = table or options.n_best > 1
    prefixes = None if prefix_file is None else _prefixes(prefix_file, source)
    interactive = str(source) == STANDARD and sys.stdin.isatty()
    window = window or (1 if interactive else WINDOW)
    quiet = True if interactive or (str(out) == STANDARD and sys.stdout.isatty()) else None
    with _opened(source) as stream, tqdm(desc="translate", unit=" lines", leave=False, disable=quiet) as bar:
        lines = _readable(stream, str(source), counts)
        found = translator.stream(lines, options, prefixes=prefixes, window=window, counts=counts, progress=bar.update)
        _write(out, (row for line, results in enumerate(found, 1) for row in _rows(line, results, table)))
    log.info("translate: %s", counts.report())
    return counts


def _prefixes(path: str | Path, source: str | Path) -> list[str]:
    """The lines of a prefix file, as many as `source` has as far as that can be known before the work."""
    found = read_lines(path)
    if Path(source).is_file():
        with _opened(source) as stream:
            lines = sum(1 for _ in stream)
        if lines != len(found):
            raise DataError(
                f"{path} has {counted(len(found), 'prefix', 'prefixes')} and {source} {counted(lines, 'line')}; "
                "give one for each line."
            )
    return found


def _opened(source: str | Path) -> AbstractContextManager[BinaryIO]:
    if str(source) == STANDARD:
        return nullcontext(sys.stdin.buffer)
    try:
        return open(source, "rb")
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror}.") from error


def _readable(stream: BinaryIO, name: str, counts: Counts) -> Iterator[str]:
    """The lines of a stream; of those that are not UTF-8 what can be read."""
    for number, (text, whole) in enumerate(lines_of(stream), 1):
        if not whole:
            counts.invalid += 1
            if counts.invalid <= TOLD:
                log.warning("translate: %s, line %d is not UTF-8; its bad bytes are read as U+FFFD", name, number)
        yield text


def _rows(line: int, results: Sequence[Translation], table: bool) -> list[str]:
    if not table:
        return [results[0].text]
    return [f"{line}\t{rank}\t{one.score:.6f}\t{one.text}" for rank, one in enumerate(results, 1)]


def _write(out: str | Path, rows: Iterable[str]) -> None:
    """To a file, which is whole or not there, or to stdout, row by row as they come."""
    if str(out) != STANDARD:
        write_lines(out, rows)
        return
    for row in rows:
        sys.stdout.buffer.write(row.encode() + b"\n")
        sys.stdout.buffer.flush()


def score_files(translator: Translator, src_file: str | Path, tgt_file: str | Path, out: str | Path) -> list[PairScore]:
    """Score the lines of two files that belong together; `out` has a log-probability TAB tokens for each pair."""
    pairs = read_aligned(src_file, tgt_file)
    scores = translator.score_pairs([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    _write(out, (f"{score.logp:.6f}\t{score.tokens}" for score in scores))
    return scores
