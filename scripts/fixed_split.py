"""The fixed split of docs/experiments.md, made again from cmn.

    nmt fetch cmn
    python scripts/fixed_split.py data/cmn/raw/cmn.txt data/cmn-fixed/raw

writes train.tsv, dev.tsv and test.tsv: English, Chinese in simplified characters (OpenCC t2s), attribution. Which rows
are in dev and test is told by the numbers of their two sentences at Tatoeba, in scripts/fixed_split.tsv: a list, so
that the split stays the same whatever later versions of nmt make of groups. All other rows are train. The published
cmn changes now and then; rows that are gone are counted, and nmt clean leaves out new ones that share a sentence with
dev or test.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from opencc import OpenCC

from nmt.errors import DataError, NmtError
from nmt.io import read_lines, write_lines

LIST = Path(__file__).with_suffix(".tsv")


def split(rows: Sequence[str], places: dict[tuple[str, ...], str]) -> dict[str, list[str]]:
    """The rows of each set in the order of the corpus, their Chinese simplified; raises DataError at a bad row."""
    simplified = OpenCC("t2s").convert
    sets: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    for number, row in enumerate(rows, 1):
        columns = row.split("\t")
        numbers = tuple(re.findall(r"#(\d+)", columns[-1]))
        if len(columns) != 3 or len(numbers) != 2:
            raise DataError(f"line {number} has not English, Chinese and an attribution with two numbers of Tatoeba.")
        sets[places.get(numbers, "train")].append("\t".join((columns[0], simplified(columns[1]), columns[2])))
    return sets


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, metavar="CMN.TXT", help="what nmt fetch cmn brings")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to: data/NAME/raw")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> None:
    """Make the files."""
    given = parsed(words)
    corpus, folder = given.corpus, given.folder
    listed = [line.split("\t") for line in read_lines(LIST)]
    sets = split(read_lines(corpus), {(en, zh): name for name, en, zh in listed})
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        write_lines(folder / f"{name}.tsv", rows)
        print(f"{folder / name}.tsv: {len(rows):,} pairs")
    gone = len(listed) - len(sets["dev"]) - len(sets["test"])
    if gone:
        print(f"{gone:,} pairs of dev and test are not in {corpus}: scores can't be compared with those of the docs")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except NmtError as error:
        sys.exit(str(error))
