"""Raw files to rows: finding the sources of a corpus, refusing what isn't one, and cutting it into chunks of lines."""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nmt.config import CleanConfig
from nmt.corpus.fetching import ORIGINS, shipped
from nmt.corpus.script import has_han
from nmt.errors import DataError
from nmt.text import decode_line

CHUNK_ROWS = 2_000
"""Rows that one process cleans at a time."""

Sources = Mapping[str, tuple[Path, ...]]

_NOT_A_CORPUS = re.compile(r"(?:[_.].*|(?:licen[cs]es?|copying|readme|notice|attribution)\b.*|.*\.json)", re.IGNORECASE)
_CHINESE = {"zh", "zho", "chi", "cmn", "yue", "lzh", "wuu"}
_MOST_BAD = 0.01
_SHOWN = 5


# ── finding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def find_sources(corpus_dir: Path, settings: CleanConfig) -> dict[str, tuple[Path, ...]]:
    """The files of each source, by name: those that the settings name, or all in `corpus_dir/raw`.

    There NAME.tsv and NAME.txt are tab-separated; NAME.en and NAME.zh (after clean.columns) belong together line by
    line. Files of the dev and test set, licences, notices and hidden files are no sources. Where `corpus_dir/raw` has
    no source, a corpus that ships with nmt is read from the package.
    """
    if settings.sources:
        named = {name: tuple(map(Path, given)) for name, given in settings.sources.items()}
        for name, paths in named.items():
            if missing := [str(path) for path in paths if not path.is_file()]:
                raise DataError(f"clean.sources: {name} names {missing[0]}, which is not a file.")
        return named
    raw = corpus_dir / "raw"
    kept_apart = {Path(path).resolve() for path in (*settings.dev, *settings.test)}
    found: dict[str, tuple[Path, ...]] = {}
    files: tuple[Path, ...]
    for path in sorted(raw.iterdir()) if raw.is_dir() else []:
        if not path.is_file() or _NOT_A_CORPUS.fullmatch(path.name) or path.resolve() in kept_apart:
            continue
        suffix = path.suffix.removeprefix(".")
        if suffix in ("tsv", "txt"):
            files = (path,)
        elif suffix in settings.columns:
            files = tuple(path.with_suffix(f".{lang}") for lang in settings.columns)
            if absent := [file.name for file in files if not file.is_file()]:
                raise DataError(f"{path} has no {absent[0]} beside it; line-aligned files come in pairs.")
        else:
            endings = ", ".join(f".{lang}" for lang in settings.columns)
            raise DataError(
                f"{path} is neither tab-separated (.tsv, .txt) nor line-aligned ({endings}); unpack or rename it, or "
                "put _ before its name to leave it out."
            )
        if found.setdefault(path.stem, files) != files:
            raise DataError(f"{path} and {found[path.stem][0]} have the same name; rename one of them.")
    if not found:
        if (ours := shipped(corpus_dir.name)) and ours.resolve() != raw.resolve():
            return find_sources(ours.parent, settings)
        known = corpus_dir.name in ORIGINS
        how = "` fills it (--from PATH where there is no network)" if known else " --from PATH` fills it"
        raise DataError(f"no corpus in {raw}; `nmt fetch {corpus_dir.name}{how}, or name your files in clean.sources.")
    return found


# ── looking through a source before it is cleaned ───────────────────────────────────────────────────────────────────


@dataclass
class Facts:
    """What one look through a source says."""

    files: list[dict[str, Any]]
    """Name, bytes, lines and SHA-256 of each file."""
    rows: int
    bad: list[int]
    """The first lines that could not be decoded."""
    han: tuple[bool, bool]
    """For each column whether at least half of its lines have a Han character."""
    has_attribution: bool


def inspect(files: Sequence[Path], settings: CleanConfig) -> Facts:
    """Reads a source once; raises DataError when it is empty, in another encoding, uneven, or has no two columns."""
    facts: list[dict[str, Any]] = []
    bad: list[int] = []
    with_han, sampled, attributed = [0, 0], 0, False
    for column, path in enumerate(files):
        digest, size, number = hashlib.sha256(), 0, 0
        seen_bad, first_bad = 0, ""
        with _open(path) as stream:
            for number, raw in enumerate(stream, 1):
                text, whole = decode_line(raw, first=number == 1, encoding=settings.encoding)
                if not whole:
                    seen_bad += 1
                    if len(bad) < _SHOWN and number not in bad:
                        bad.append(number)
                    first_bad = first_bad or f"{path}, line {number}, byte {size + _bad_byte(raw, settings.encoding)}"
                digest.update(raw)
                size += len(raw)
                # Every line of the start and one in sixteen of the rest tell a column's script.
                if number <= 1000 or number % 16 == 0:
                    if len(files) == 2:
                        with_han[column] += has_han(text)
                        sampled += bool(text.strip()) and column == 0
                    else:
                        columns = text.split("\t")
                        if len(columns) in (2, 3):
                            sampled += 1
                            with_han = [n + has_han(side) for n, side in zip(with_han, columns, strict=False)]
                            attributed = attributed or len(columns) == 3
        if not size:
            raise DataError(f"{path} is empty: an interrupted download, perhaps; fetch it again.")
        facts.append({"file": path.name, "bytes": size, "lines": number, "sha256": digest.hexdigest()})
        if seen_bad > _MOST_BAD * number:
            raise DataError(
                f"{first_bad}: not {settings.encoding}, and {seen_bad:,} of {number:,} lines are like that; "
                "name the encoding (clean.encoding, --encoding; for Chinese often gb18030 or big5)."
            )
    if len({fact["lines"] for fact in facts}) > 1:
        counts = ", ".join(f"{path} has {fact['lines']:,} lines" for path, fact in zip(files, facts, strict=True))
        raise DataError(f"{counts}; they must match line by line, so one of them is not what it should be.")
    if not sampled:
        raise DataError(
            f"{files[0]} has no line with two columns (text TAB text); give a tab-separated file or two aligned files."
        )
    han = (2 * with_han[0] >= sampled, 2 * with_han[1] >= sampled)
    _check_script(" and ".join(map(str, files)), han, [n / sampled for n in with_han], settings)
    return Facts(facts, facts[0]["lines"], bad, han, attributed)


def _check_script(where: str, han: tuple[bool, bool], shares: Sequence[float], settings: CleanConfig) -> None:
    """Refuses columns that a language's name contradicts: the commonest fault is that they are swapped."""
    chinese = tuple(re.split("[-_]", lang.lower())[0] in _CHINESE for lang in settings.columns)
    if han == chinese or chinese[0] == chinese[1]:
        return
    one, two = settings.columns
    if han == chinese[::-1]:
        raise DataError(
            f"{where}: the columns are swapped: {two if chinese[1] else one} is the other one; "
            f"say so with clean.columns=[{two},{one}]."
        )
    raise DataError(
        f"{where}: {shares[0]:.0%} of the lines of column 1 ({one}) and {shares[1]:.0%} of column 2 ({two}) have a Han "
        "character; that is not the corpus it should be."
    )


def _open(path: Path) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from error


def _bad_byte(raw: bytes, encoding: str) -> int:
    try:
        raw.decode(encoding)
    except UnicodeDecodeError as error:
        return error.start
    return 0


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Chunk(NamedTuple):
    """Consecutive raw lines of one source, `first` being the number of its first line."""

    source: int
    first: int
    lines: list[tuple[bytes, ...]]


def chunks(sources: Sequence[tuple[Path, ...]]) -> Iterator[Chunk]:
    """All lines of all sources, in order; a line is its bytes in each file of its source."""
    for source, files in enumerate(sources):
        streams = [_open(path) for path in files]
        try:
            rows = zip(*streams, strict=True)
            first = 1
            while lines := list(itertools.islice(rows, CHUNK_ROWS)):
                yield Chunk(source, first, lines)
                first += len(lines)
        finally:
            for stream in streams:
                stream.close()


class Row(NamedTuple):
    """One line; `fault` is why it is none: `undecodable`, `columns` or nothing."""

    number: int
    left: str
    right: str
    attribution: str
    fault: str | None


def rows(chunk: Chunk, encoding: str) -> Iterator[Row]:
    """The rows of a chunk; one that is no row has its whole line as `left`."""
    for number, raw in enumerate(chunk.lines, chunk.first):
        decoded = [decode_line(part, first=number == 1, encoding=encoding) for part in raw]
        texts, fault = [text for text, _ in decoded], None
        columns = texts if len(texts) == 2 else texts[0].split("\t")
        if not all(whole for _, whole in decoded):
            fault = "undecodable"
        elif not any(text.strip() for text in texts):
            fault = "empty"
        elif len(columns) not in (2, 3):
            fault = "columns"
        if fault and len(texts) == 1:
            yield Row(number, texts[0], "", "", fault)
        else:
            yield Row(number, columns[0], columns[1], columns[2] if len(columns) == 3 else "", fault)
