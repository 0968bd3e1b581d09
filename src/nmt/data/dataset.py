"""encode: clean text as memory-mapped token ids, and the parallel corpus that training reads.

Each split and language has two files: `NAME.ids`, all tokens of all sentences one after another (16 bits where the
vocabulary allows), each sentence with its eos, and `NAME.offsets`, where each begins. `meta.json` says the rest.
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from nmt.config import EncodeConfig
from nmt.data.batching import Numbers
from nmt.data.tokenizer import Tokenizer, load_tokenizers
from nmt.errors import DataError, counted, describe_error
from nmt.io import decode_line, lines_of, sha256_of
from nmt.special_tokens import EOS, PAD

FORMAT = 1
WINDOW = 50_000
"""Pairs that are held in memory at a time while encoding."""

BLOCK = 2**24
"""Bytes of text that are searched for line ends at a time."""

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class Column:
    """One language's sentences as token ids, each ending with eos."""

    ids: npt.NDArray[Any]
    offsets: Numbers

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    @functools.cached_property
    def lengths(self) -> Numbers:
        """Tokens of each sentence, eos counted; worked out once."""
        return np.diff(self.offsets)

    def padded(self, rows: Numbers) -> npt.NDArray[np.int64]:
        """The ids of these sentences as one matrix as wide as the longest, filled up with pad."""
        starts, ends = self.offsets[rows, None], self.offsets[rows + 1, None]
        places = starts + np.arange((ends - starts).max())
        # A place behind the end of a short sentence is in the next one, or behind the last, and is not looked at.
        return np.where(places < ends, self.ids.take(places, mode="clip"), PAD).astype(np.int64)


@dataclass(frozen=True)
class ParallelDataset:
    """Pairs of sentences as token ids."""

    src: Column
    tgt: Column
    rows: Numbers
    """For each pair the line of the clean text that it came from, from 0."""

    def __len__(self) -> int:
        return len(self.src)

    def take(self, pairs: Numbers) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The ids of both sides of these pairs, each as one padded matrix; see `collate`."""
        return self.src.padded(pairs), self.tgt.padded(pairs)


def encode_corpus(
    clean: Path, bpe: Path, settings: EncodeConfig, languages: tuple[str, ...], out: Path
) -> dict[str, Any]:
    """Encode every split of `clean` with the tokenizer in `bpe` into `out`; returns the counts, as in meta.json.

    Pairs with a side over `settings.max_tokens` are dropped and counted; none is cut. Raises DataError when nothing
    is left to train on.
    """
    tokenizers = load_tokenizers(bpe, languages[0], languages[1])
    meta: dict[str, Any] = {"format": FORMAT, "languages": list(languages), "splits": {}}
    pairs = sum(_count_lines(clean / f"{split}.{languages[0]}") for split in SPLITS)
    with tqdm(total=pairs, desc="encode", unit=" pairs", disable=None, leave=False) as bar:
        for split in SPLITS:
            counts = _encode_split(clean, split, tokenizers, settings.max_tokens, languages, out, bar.update)
            meta["splits"][split] = counts
    meta["sha256"] = {path.name: sha256_of(path) for path in sorted(out.iterdir())}
    meta["vocab_size"] = [len(tokenizer) for tokenizer in tokenizers]
    (out / "meta.json").write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for split in ("train", "dev"):
        if not meta["splits"][split]["pairs"]:
            raise DataError(f"no {split} pair of {clean} is left; encode.max_tokens is {settings.max_tokens}.")
    return meta


def _encode_split(
    clean: Path,
    split: str,
    tokenizers: tuple[Tokenizer, Tokenizer],
    max_tokens: int,
    languages: tuple[str, ...],
    out: Path,
    done: Callable[[int], object],
) -> dict[str, int]:
    """Encode one split; `done` is told how many pairs more have been encoded."""
    kept: list[int] = []
    lengths: tuple[list[int], list[int]] = ([], [])
    read = 0
    dtypes = [np.uint16 if len(tokenizer) <= 2**16 else np.uint32 for tokenizer in tokenizers]
    streams = [open(out / f"{split}.{language}.ids", "wb") for language in languages]  # noqa: SIM115
    try:
        for window in _windows(clean, split, languages):
            sides = [tokenizer.encode(lines) for tokenizer, lines in zip(tokenizers, window, strict=True)]
            for row, pair in enumerate(zip(*sides, strict=True), read):
                if max(map(len, pair)) + 1 <= max_tokens:
                    kept.append(row)
                    for side, ids in enumerate(pair):
                        lengths[side].append(len(ids) + 1)
                        streams[side].write(np.array([*ids, EOS], dtype=dtypes[side]).tobytes())
            read += len(window[0])
            done(len(window[0]))
    finally:
        for stream in streams:
            stream.close()
    for language, column in zip(languages, lengths, strict=True):
        offsets = np.concatenate([[0], np.cumsum(column, dtype=np.int64)]).astype(np.int64)
        # Not tofile, which says nothing when the disk is full.
        (out / f"{split}.{language}.offsets").write_bytes(offsets.tobytes())
    (out / f"{split}.rows").write_bytes(np.array(kept, dtype=np.int64).tobytes())
    counts = {"pairs": len(kept), "dropped": read - len(kept)}
    return counts | {f"{name}_tokens": sum(column) for name, column in zip(languages, lengths, strict=True)}


def _count_lines(path: Path) -> int:
    with open(path, "rb") as stream:
        return sum(block.count(b"\n") for block in iter(functools.partial(stream.read, 1 << 20), b""))


def _windows(clean: Path, split: str, languages: Sequence[str]) -> Iterator[list[list[str]]]:
    """The lines of a split in windows, one list for each language."""
    window: list[list[str]] = [[] for _ in languages]
    paths = [clean / f"{split}.{language}" for language in languages]
    with open(paths[0], "rb") as left, open(paths[1], "rb") as right:
        try:
            for pair in zip(lines_of(left), lines_of(right), strict=True):
                for side, (text, _) in zip(window, pair, strict=True):
                    side.append(text)
                if len(window[0]) == WINDOW:
                    yield window
                    window = [[] for _ in languages]
        except ValueError as error:
            raise DataError(
                f"{paths[0]} and {paths[1]} have different numbers of lines; run nmt clean again."
            ) from error
    if window[0]:
        yield window


def table_of_counts(meta: dict[str, Any]) -> list[str]:
    """The counts of an encode folder as a table for the terminal: pairs, those that were too long, and tokens."""
    names = [f"{language} tokens" for language in meta["languages"]]
    heads = ["", "pairs", "too long", *names]
    rows = [
        [split, *(f"{counts[key]:,}" for key in ("pairs", "dropped", *(name.replace(" ", "_") for name in names)))]
        for split in SPLITS
        for counts in [meta["splits"][split]]
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (heads, *rows)
    ]


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json of an encode folder; raises DataError if it isn't one of this format."""
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_bytes())
        found = meta["format"]
        if found == FORMAT:
            languages, sizes, hashes, splits = (meta[key] for key in ("languages", "vocab_size", "sha256", "splits"))
            shapes = (isinstance(hashes, dict), isinstance(splits, dict), all(isinstance(n, int) for n in sizes))
            if not all(shapes) or len(languages) != len(sizes) or not all(isinstance(name, str) for name in languages):
                raise ValueError("its values have other types")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{folder} is no folder of encoded data (meta.json: {error}); run nmt encode.") from error
    if found != FORMAT:
        raise DataError(f"{folder} has format {found}, this nmt reads {FORMAT}; run nmt encode.")
    return meta


def open_dataset(folder: Path, split: str, src: str, tgt: str, *, verify: bool = True) -> ParallelDataset:
    """The split of an encode folder, memory-mapped, from `src` into `tgt`; each file must be as it was written.

    Without `verify` the files are neither hashed nor looked through: for one of several processes that read the same
    disk of a machine, whose memory they share.
    """
    meta = read_meta(folder)
    sizes = dict(zip(meta["languages"], meta["vocab_size"], strict=True))
    for language in (src, tgt):
        if language not in sizes:
            raise DataError(f"{folder} has {', '.join(sizes)}, not {language}; check data.src and data.tgt.")

    def check(name: str) -> None:
        try:
            found = sha256_of(folder / name)
        except OSError as error:
            raise DataError(f"cannot read {describe_error(error, folder / name)}; run nmt encode again.") from error
        if found != meta["sha256"].get(name):
            raise DataError(f"{folder / name} is not what was written (its SHA-256 differs); run nmt encode again.")

    def column(language: str) -> Column:
        offsets = _mapped(folder / f"{split}.{language}.offsets", np.int64)
        path = folder / f"{split}.{language}.ids"
        ids = _mapped(path, np.uint16 if sizes[language] <= 2**16 else np.uint32)
        found = Column(ids, offsets)
        wrong = not len(offsets) or offsets[0] or offsets[-1] != len(ids)
        if wrong or (verify and (found.lengths < 1).any()):
            raise DataError(f"{path} has {counted(len(ids), 'token')}, but others are listed; run nmt encode again.")
        return found

    if verify:
        names = [f"{language}.{kind}" for language in dict.fromkeys((src, tgt)) for kind in ("ids", "offsets")]
        with ThreadPoolExecutor() as pool:  # While one file is hashed, Python goes on.
            list(pool.map(check, (f"{split}.{name}" for name in (*names, "rows"))))
    sides = column(src), column(tgt)
    rows = _mapped(folder / f"{split}.rows", np.int64)
    if {len(side) for side in sides} != {len(rows)}:
        raise DataError(f"{folder} has sides of different lengths in {split}; run nmt encode again.")
    return ParallelDataset(*sides, rows)


def _mapped(path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The numbers of a file, memory-mapped: processes of one machine share them, and what is not read costs nothing."""
    size = path.stat().st_size // np.dtype(dtype).itemsize
    # An empty file cannot be mapped. A plain array of the mapped memory is indexed faster than a memmap.
    return np.asarray(np.memmap(path, dtype, "r", shape=(size,))) if size else np.zeros(0, dtype)


class Lines:
    """The lines of a file of clean text, which are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.bytes = _mapped(path, np.uint8)
        except OSError as error:
            raise DataError(f"cannot read {describe_error(error, path)}; run nmt clean again.") from error
        blocks = range(0, len(self.bytes), BLOCK)
        ends = [np.flatnonzero(self.bytes[start : start + BLOCK] == ord("\n")) + start + 1 for start in blocks]
        self.starts = np.concatenate([[0], *ends, [len(self.bytes)]])

    def take(self, rows: Numbers) -> list[str]:
        """The text of these lines, from 0."""
        found = [
            decode_line(self.bytes[self.starts[row] : self.starts[row + 1]].tobytes(), first=row == 0)
            for row in rows.tolist()
        ]
        for row, (_, whole) in zip(rows, found, strict=True):
            if not whole:
                raise DataError(f"{self.path}, line {row + 1:,} is not UTF-8; run nmt clean again.")
        return [text for text, _ in found]


def resample(
    plain: ParallelDataset,
    pairs: Numbers,
    text: tuple[Sequence[str], Sequence[str]],
    tokenizers: tuple[Tokenizer, Tokenizer],
    dropout: float,
    seed: int,
    max_tokens: int,
) -> ParallelDataset:
    """These pairs cut anew by BPE-dropout, a pure function of its arguments; `text` holds their lines.

    A pair that became longer than `max_tokens` keeps its plain pieces.
    """
    sides = [
        tokenizer.encode_sampled(lines, dropout, seed * 2 + side)
        for side, (tokenizer, lines) in enumerate(zip(tokenizers, text, strict=True))
    ]
    too_long = {i for side in sides for i, ids in enumerate(side) if len(ids) + 1 > max_tokens}

    def column(side: list[list[int]], plain: Column) -> Column:
        rows = [plain[int(pairs[i])].tolist() if i in too_long else [*ids, EOS] for i, ids in enumerate(side)]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        flat = np.fromiter(itertools.chain.from_iterable(rows), dtype=plain.ids.dtype, count=int(lengths.sum()))
        return Column(flat, np.concatenate([[0], np.cumsum(lengths)]))

    return ParallelDataset(column(sides[0], plain.src), column(sides[1], plain.tgt), plain.rows[pairs])
