"""Raw files to rows: finding the sources of a corpus, refusing what isn't one, and cutting it into chunks of lines."""

import codecs
import functools
import hashlib
import itertools
import logging
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nmt.charset import MOST_BAD, SAMPLE, Plausibility, encoding_of, how_to_convert, is_utf_8, utf_16
from nmt.config import CleanConfig
from nmt.corpus.fetching import ORIGINS, shipped
from nmt.corpus.layout import (
    FEW,
    LEAST_SHARE,
    MOST_COLUMNS,
    TAB,
    Layout,
    cells_of,
    foreign_format,
    how_to_unquote,
    is_separated_by,
)
from nmt.corpus.script import is_chinese
from nmt.errors import DataError, counted
from nmt.io import decode_line
from nmt.languages import parse

log = logging.getLogger(__name__)

CHUNK_ROWS = 2_000
"""Rows that one process cleans at a time."""

Sources = Mapping[str, tuple[Path, ...]]

_NOT_A_CORPUS = re.compile(r"(?:licen[cs]es?|copying|readme|notice|attribution)\b.*|.*\.json", re.IGNORECASE)
_SHOWN = 5


# ── finding ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def find_sources(corpus_dir: Path, settings: CleanConfig) -> dict[str, tuple[Path, ...]]:
    """The files of each source, by name: those that the settings name, or all in `corpus_dir/raw`.

    There NAME.tsv and NAME.txt are tab-separated; NAME.en and NAME.zh (after clean.columns) belong together line by
    line. Files of the dev and test set and names that begin with _ or a dot are no sources; what else is left out,
    such as licences and folders, is logged. Where `corpus_dir/raw` has no source, a corpus that ships with nmt is read
    from the package.
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
    left_out: list[str] = []
    for path in sorted(raw.iterdir()) if raw.is_dir() else []:
        if path.name.startswith(("_", ".")) or path.resolve() in kept_apart:
            continue
        if reason := _no_source(path):
            left_out.append(f"{path.name} ({reason})")
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
                f"{path} is neither tab-separated (.tsv, .txt) nor line-aligned ({endings}); put _ before its name to "
                f"leave it out, or {_how_to_use(path)}"
            )
        if found.setdefault(path.stem, files) != files:
            raise DataError(f"{path} and {found[path.stem][0]} have the same name; rename one of them.")
    if left_out:
        _warn_once(f"{raw}: left out {', '.join(left_out)}")
    if not found:
        if (ours := shipped(corpus_dir.name)) and ours.resolve() != raw.resolve():
            return find_sources(ours.parent, settings)
        known = corpus_dir.name in ORIGINS
        how = "` fills it (--from PATH where there is no network)" if known else " --from PATH` fills it"
        raise DataError(f"no corpus in {raw}; `nmt fetch {corpus_dir.name}{how}, or name your files in clean.sources.")
    return found


def _no_source(path: Path) -> str:
    """Why something in a raw folder is not read; empty where it is."""
    if path.is_dir():
        return "a folder"
    if not path.is_file():
        return "a link to nothing" if path.is_symlink() else "not a file"
    return "by its name a licence or notice; rename it if not" if _NOT_A_CORPUS.fullmatch(path.name) else ""


def _how_to_use(path: Path) -> str:
    """What to do with a file of another kind."""
    if path.suffix.lower() == ".csv":
        return f"convert it: {how_to_unquote(path, ',')}"
    with _open(path) as stream:
        found = foreign_format(stream.read(4096))
    return f"{found[1]}: it is {found[0]}." if found else "rename it."


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)  # The sources are looked for several times by one command.


# ── looking through a source before it is cleaned ─────────────────────────────────────────────────────────────────────


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
    columns: int
    """Two, or three where the last one names whom to credit."""

    @property
    def has_attribution(self) -> bool:
        return self.columns == 3


def inspect(files: Sequence[Path], settings: CleanConfig) -> Facts:
    """Reads a source once; raises DataError when it is empty, in another encoding, uneven, or laid out otherwise."""
    facts, layouts, bad = zip(*(_look_through(path, settings.encoding) for path in files), strict=True)
    if len({fact["lines"] for fact in facts}) > 1:
        counts = ", ".join(f"{path} has {counted(f['lines'], 'line')}" for path, f in zip(files, facts, strict=True))
        raise DataError(f"{counts}; they must match line by line, so one of them is not what it should be.")
    check_layout(files, layouts)
    han = _check_script(files, layouts, settings)
    lines = sorted(set(itertools.chain.from_iterable(bad)))[:_SHOWN]
    return Facts(list(facts), facts[0]["lines"], lines, han, max(2, layouts[0].columns))


def _look_through(path: Path, encoding: str) -> tuple[dict[str, Any], Layout, list[int]]:
    """A file's name, size, lines and hash; its layout; and its first lines that could not be decoded."""
    digest, size, number = hashlib.sha256(), 0, 0
    bad: list[int] = []
    seen_bad, first_bad, first_byte = 0, 0, 0
    layout, plausibility, judged = Layout(), Plausibility(), not _is_utf_8(encoding)
    with _open(path) as stream:
        _check_start(path, stream.read(SAMPLE), encoding)
        stream.seek(0)
        for number, raw in enumerate(stream, 1):
            text, whole = decode_line(raw, first=number == 1, encoding=encoding)
            if not whole:
                if not seen_bad:
                    first_bad, first_byte = size, size + _bad_byte(raw, encoding)
                seen_bad += 1
                if len(bad) < _SHOWN:
                    bad.append(number)
            # Every line of the start and one in sixteen of the rest tell of the columns.
            sampled = number <= 1000 or number % 16 == 0
            if sampled and text.strip():
                layout.add(text.split(TAB))
                if judged and (share := plausibility.add(text, number, size)) is not None:
                    raise _implausible(path, encoding, plausibility, number, share)
            elif '"' in text:
                layout.add_quotes(text.split(TAB))
            digest.update(raw)
            size += len(raw)
    if seen_bad > MOST_BAD * number:
        raise DataError(
            f"{path}, line {bad[0]}, byte {first_byte}: not {encoding}, and {seen_bad:,} of {counted(number, 'line')} "
            f"are like that; {_advice(path, encoding, first_bad)}"
        )
    if (share := plausibility.judge()) is not None:
        raise _implausible(path, encoding, plausibility, number, share)
    return {"file": path.name, "bytes": size, "lines": number, "sha256": digest.hexdigest()}, layout, bad


def _check_start(path: Path, start: bytes, encoding: str) -> None:
    """Refuses what its first bytes show to be no text, or text in another encoding."""
    if not start:
        raise DataError(f"{path} is empty: an interrupted download, perhaps; fetch it again.")
    if found := foreign_format(start):
        raise DataError(f"{path} is {found[0]}, not tab-separated or line-aligned text; {found[1]}.")
    if likely := utf_16(start):
        raise DataError(f"{path} is {likely.upper()}, not {encoding}; convert it: {how_to_convert(path, likely)}")
    if not _is_utf_8(encoding) and is_utf_8(start.split(b"\n")[:-1]):
        raise DataError(f"{path} is UTF-8, not {encoding}; leave clean.encoding and --encoding out.")


def _implausible(path: Path, encoding: str, found: Plausibility, last: int, share: float) -> DataError:
    return DataError(
        f"{path}, lines {found.first:,} to {last:,}: read as {encoding}, only {share:.0%} of their Han characters are "
        f"common ones, and of text over 95 % are; {_advice(path, encoding, found.offset)}"
    )


def _advice(path: Path, encoding: str, offset: int) -> str:
    """What to do about a file that isn't in `encoding` from the byte `offset` on."""
    likely = encoding_of(path, offset)
    if likely and codecs.lookup(likely) != codecs.lookup(encoding):
        command = how_to_convert(path, likely)
        return f"it looks like {likely}: say so with --encoding {likely} (clean.encoding), or convert it: {command}"
    return "name its encoding (--encoding, clean.encoding; for Chinese often gb18030 or big5), or convert it to UTF-8."


def _is_utf_8(encoding: str) -> bool:
    return codecs.lookup(encoding).name.startswith("utf-8")


def check_layout(files: Sequence[Path], layouts: Sequence[Layout]) -> None:
    """Refuses what isn't one tab-separated file or two line-aligned ones, without quoting; says what it is."""
    for path, layout in zip(files, layouts, strict=True):
        if not layout.lines:
            raise DataError(f"{path} has no text, only blank lines.")
        if layout.is_quoted:
            raise DataError(
                f"{path} has its cells in quotes and quotes inside them doubled, as spreadsheets write CSV, and they "
                f"would stay in the text; convert it: {how_to_unquote(path)}"
            )
        if layout.has_quoted_part:
            raise DataError(
                f"{path} has a part with cells in quotes and quotes inside them doubled, as spreadsheets write CSV, "
                "beside plain quotations; convert that part before it is put together with the rest."
            )
        if len(files) == 2 and layout.columns > 1:
            raise DataError(
                f"{path} has TABs in most of its lines, so it is not line-aligned; name each tab-separated file alone."
            )
    if len(files) == 2:
        return
    (path,), (layout,) = files, layouts
    if layout.columns < 2:
        mark = is_separated_by(layout.without_tab)
        seems = f"; it looks separated by {mark!r}, so convert it: {how_to_unquote(path, mark)}" if mark else ""
        raise DataError(
            f"{path} has no line with two columns (text TAB text), or only few"
            + (seems or "; give a tab-separated file or two aligned files.")
        )
    if layout.columns > 3:
        raise DataError(
            f"{path} has {layout.columns}{' or more' * (layout.columns > MOST_COLUMNS)} columns in most of its lines; "
            f"give two, and a third only for whom to credit{_how_to_choose(path, layout)}"
        )
    if layout.columns == 2 and layout.with_third > FEW:
        raise DataError(
            f"{path} has a third column in {layout.with_third:.0%} of its lines, and two in the others; give all lines "
            "the same columns (a third one, for whom to credit, may be empty), or make two files of them."
        )


def _how_to_choose(path: Path, layout: Layout) -> str:
    """The end of a sentence: which column is Chinese, and the command that keeps it and the longest of the others."""
    han, other = layout.han_columns(), layout.longest_without_han()
    if len(han) != 1 or not other:
        return "."
    columns = ",".join(map(str, sorted((han[0], other))))
    return f"; column {han[0]} is the one in Chinese, so perhaps: cut -f {columns} {shlex.quote(str(path))} > NEW.tsv"


def _check_script(files: Sequence[Path], layouts: Sequence[Layout], settings: CleanConfig) -> tuple[bool, bool]:
    """Which side is written in Han characters; refuses sides that their language's name contradicts."""
    # The commonest fault is that they are swapped.
    places = [(layouts[0], 1), (layouts[0], 2) if len(files) == 1 else (layouts[1], 1)]
    one, two = (layout.share_of_han(column) for layout, column in places)
    han = (one >= LEAST_SHARE, two >= LEAST_SHARE)
    chinese = tuple(map(is_chinese, settings.columns))
    also_han = tuple(one or parse(lang).primary == "ja" for one, lang in zip(chinese, settings.columns, strict=True))
    if han in (chinese, also_han) or chinese[0] == chinese[1]:
        return han
    first, second = settings.columns
    where, language = " and ".join(map(str, files)), settings.columns[chinese.index(True)]
    if han == chinese[::-1]:
        raise DataError(
            f"{where}: the columns are swapped: {language} is the other one; "
            f"say so with clean.columns=[{second},{first}]."
        )
    if len(files) == 1 and not any(han) and layouts[0].han_columns():
        raise DataError(f"{where} has no Chinese in its first two columns{_how_to_choose(files[0], layouts[0])}")
    shares = f"{one:.0%} of the lines of column 1 ({first}) and {two:.0%} of column 2 ({second}) have a Han character"
    if any(han):
        raise DataError(f"{where}: {shares}; that is not the corpus it should be.")
    if not _is_utf_8(settings.encoding):
        path = files[chinese.index(True) % len(files)]
        raise DataError(f"{where}: {shares} when read as {settings.encoding}; {_advice(path, settings.encoding, 0)}")
    raise DataError(
        f"{where}: {shares}, so it is not the corpus it should be. Name the languages if it is another pair: "
        "--set 'clean.columns=[en,fr]' --set data.src=en --set data.tgt=fr."
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


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Chunk(NamedTuple):
    """Consecutive raw lines of one source, `first` being the number of its first line."""

    source: int
    first: int
    lines: list[tuple[bytes, ...]]
    columns: int = 3
    """Of the source: two, or three where the last one names whom to credit."""


def chunks(sources: Sequence[tuple[Path, ...]], columns: Sequence[int]) -> Iterator[Chunk]:
    """All lines of all sources, in order; a line is its bytes in each file of its source."""
    for source, files in enumerate(sources):
        streams = [_open(path) for path in files]
        try:
            rows = zip(*streams, strict=True)
            first = 1
            while lines := list(itertools.islice(rows, CHUNK_ROWS)):
                yield Chunk(source, first, lines, columns[source])
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
        cells = texts if len(texts) == 2 else cells_of(texts[0], chunk.columns)
        if not all(whole for _, whole in decoded):
            fault = "undecodable"
        elif not any(text.strip() for text in texts):
            fault = "empty"
        elif cells is None:
            fault = "columns"
        if cells is None or (fault and len(texts) == 1):
            yield Row(number, texts[0], "", "", fault)
        else:
            yield Row(number, cells[0], cells[1], cells[2] if len(cells) == 3 else "", fault)
