"""What a training has seen: the keys of its sentences, so that no test set with some of them is scored unnoticed."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nmt.corpus import Normaliser, held_out_keys
from nmt.errors import ConfigError, DataError
from nmt.io import read_lines, write_bytes
from nmt.runs.run_dir import RunDir

log = logging.getLogger(__name__)

SHOWN = 60
"""Characters of a test line that an error quotes."""


def keep_keys(clean: Path, languages: Sequence[str], run: Path, init_from: Path | None = None) -> None:
    """Add the keys of the training text to those of the run, and those of the run whose weights it begins with.

    Raises ConfigError if the languages of that run come in another order, since keys of different sides differ.
    """
    RunDir(run).train_keys.mkdir(parents=True, exist_ok=True)
    if init_from is not None:
        earlier = list(Normaliser.load(RunDir(init_from).normalisation_file).han)
        if earlier != list(languages):
            raise ConfigError(
                f"--init-from: {init_from} was trained on the columns {', '.join(earlier)}, this corpus has "
                f"{', '.join(languages)}; give clean.columns in the same order, so that the text can be compared."
            )
    for lang in languages:
        path = RunDir(run).train_keys / f"{lang}.keys"
        sources = [clean / f"train.{lang}.keys", *([path] if path.exists() else [])]
        sources += [RunDir(init_from).train_keys / f"{lang}.keys"] if init_from is not None else []
        write_bytes(path, _merged([_read(source) for source in sources]).tobytes())


def _merged(sorted_keys: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """The keys that are in any of these, sorted, each once.

    A stable sort merges what is sorted already, in a third of a second for twice 20 million keys. `np.unique`, which
    hashes them from numpy 2.3 on, takes a minute.
    """
    keys: NDArray[np.uint64] = np.sort(np.concatenate(sorted_keys), kind="stable")
    first = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
    merged: NDArray[np.uint64] = keys[first]
    return merged


def _read(path: Path) -> NDArray[np.uint64]:
    try:
        return np.fromfile(path, dtype="<u8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; run nmt clean, or train the run again.") from error


def seen(run: Path, src: str, srcs: Sequence[str], refs: Sequence[Sequence[str]]) -> NDArray[np.bool_]:
    """For each test line whether its source or one of its references is a sentence that the run was trained on.

    `src` is the language of the sources.
    """
    normaliser = Normaliser.load(RunDir(run).normalisation_file)
    lines = [line for line, row in enumerate(refs) for _ in row]
    pairs = [(srcs[line], ref) for line, row in enumerate(refs) for ref in row]
    if src != next(iter(normaliser.han)):  # Keys differ by column.
        pairs = [(right, left) for left, right in pairs]
    found = np.zeros(len(srcs), dtype=bool)
    for keys, lang in zip(held_out_keys(pairs, normaliser), normaliser.han, strict=True):
        known = np.isin(keys, _read(RunDir(run).train_keys / f"{lang}.keys")).any(axis=1)
        np.logical_or.at(found, lines, known)
    return found


def check_unseen(run: Path, src: str, srcs: Sequence[str], refs: Sequence[Sequence[str]], allow: bool) -> int:
    """How many test lines the run was trained on; raises DataError if there is one, unless that is allowed."""
    found = np.flatnonzero(seen(run, src, srcs, refs))
    if len(found) and not allow:
        first = srcs[found[0]][:SHOWN]
        raise DataError(
            f"{len(found):,} of {len(srcs):,} test lines have a sentence that {run} was trained on (the first is line "
            f"{found[0] + 1:,}: {first}), so a score would be too good. Take another test set, or score this one all "
            "the same with nmt eval --allow-overlap."
        )
    return len(found)


def warn_of_overlap(run: Path, clean: Path, direction: tuple[str, str]) -> None:
    """Warn at the start of a training if the weights that it begins with were trained on its own dev or test set."""
    for part in ("dev", "test"):
        srcs, tgts = (read_lines(clean / f"{part}.{lang}") for lang in direction)
        count = int(seen(run, direction[0], srcs, [[line] for line in tgts]).sum())
        if count:
            log.warning(
                "train: the weights of --init-from were trained on %s of the %s lines of %s; its scores will be too "
                "good, and nmt eval will refuse it without --allow-overlap",
                *(f"{count:,}", f"{len(srcs):,}", part),
            )
