"""What files hold that aren't plain tab-separated text: they are refused by what they are, and odd rows are counted."""

import dataclasses
import subprocess
from pathlib import Path

import pytest

from nmt.config import CleanConfig
from nmt.corpus import clean_corpus
from nmt.corpus.layout import Layout, cells_of, foreign_format
from nmt.corpus.reading import inspect
from nmt.errors import DataError, counted
from nmt.io import read_lines

SMALL = CleanConfig(dev_size=12, test_size=10)
PAIRS = [(f"Number {n} is here.", f"第{n}号在这里。") for n in range(200)]


def cleaned(folder: Path, lines: list[str], **more):
    """The report and the rejected rows of a tab-separated file with these lines."""
    (folder / "x.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")
    (folder / "out").mkdir()
    report = clean_corpus({"x": (folder / "x.tsv",)}, dataclasses.replace(SMALL, **more), folder / "out")
    rejected = [line.split("\t") for line in read_lines(folder / "out" / "rejected.tsv")[1:]]
    return report, rejected


def refusal(folder: Path, *files: str | list[str], **more) -> str:
    """Why the source of one or two files is refused; empty if it isn't."""
    paths = [folder / f"x{number}.tsv" for number, _ in enumerate(files)]
    for path, text in zip(paths, files, strict=True):
        text = text if isinstance(text, str) else "".join(f"{line}\n" for line in text)
        path.write_text(text, encoding="utf-8", newline="")
    try:
        inspect(paths, dataclasses.replace(SMALL, **more))
    except DataError as error:
        return str(error)
    return ""


# ── columns ─────────────────────────────────────────────────────────────────────────────────────────────────────────

TWO, THREE = [f"{en}\t{zh}" for en, zh in PAIRS], [f"{en}\t{zh}\tby A" for en, zh in PAIRS]
ROWS = [
    # A row, and what it is in a source of two columns and in one of three: en | zh | whom to credit, or nothing.
    ("One.\t一。", "One.|一。|", "One.|一。|"),
    ("One.\t一。\tby B", "", "One.|一。|by B"),
    ("One two.\t一。\t二。", "", "One two.|一。|二。"),
    ("One two.\t一。\t\t二。", "", ""),
    ("One two.\t一。\tby B\t二。", "", ""),
    ("One.\t一。\t", "One.|一。|", "One.|一。|"),
    ("One.\t一。\t\t \t", "One.|一。|", "One.|一。|"),
    ("One.\t一。\tby B\t\t", "", "One.|一。|by B"),
    ("One. 一。", "", ""),
    ("One. 一。\t", "One. 一。||", "One. 一。||"),
]


@pytest.mark.parametrize(("row", "in_two", "in_three"), ROWS)
def test_a_row_of_another_shape_than_its_source_is_no_row_and_never_half_of_one(row, in_two, in_three):
    for columns, wanted in ((2, in_two), (3, in_three)):
        cells = cells_of(row, columns)
        assert "|".join([*(cells or []), ""][:3] if cells and len(cells) == 2 else cells or []) == wanted


def test_a_third_cell_in_a_source_of_two_columns_is_dropped_with_its_row_and_counted(tmp_path):
    odd = ["One two.\t一。\t二。", "This is long.\t这是\t长的。", "Yes.\t是。\tby A", "A\tB\tC\tD"]
    report, rejected = cleaned(tmp_path, [*TWO[:50], *odd, *TWO[50:]])
    assert report["dropped"] == {"columns": report["dropped"]["columns"]}
    assert report["dropped"]["columns"]["rows"] == 4
    assert [row[:4] for row in rejected] == [
        ["columns", "x", str(51 + n), line.replace("\t", " ")] for n, line in enumerate(odd)
    ]
    assert not list((tmp_path / "out").glob("*.attribution"))


def test_a_row_without_its_third_cell_is_kept_and_counted_as_without_credit(tmp_path):
    lines = [*THREE[:50], *TWO[50:53], f"{TWO[53]}\t", *THREE[54:]]
    report, rejected = cleaned(tmp_path, lines)
    assert not rejected
    assert (report["input"], report["sources"]["x"]["attributed"]) == (200, 196)


def test_a_third_column_may_be_mostly_empty_and_padding_is_no_column(tmp_path):
    (tmp_path / "some").mkdir()
    report, _ = cleaned(tmp_path / "some", [*THREE[:20], *(f"{line}\t" for line in TWO[20:])])
    assert (report["kept"], report["sources"]["x"]["attributed"]) == (200, 20)
    (tmp_path / "padded").mkdir()
    report, rejected = cleaned(tmp_path / "padded", ["One two.\t一。\t二。\t", *(f"{line}\t\t\t" for line in TWO)])
    assert (report["kept"], report["sources"]["x"]["attributed"]) == (200, 0)
    assert [row[0] for row in rejected] == ["columns"]


def test_a_source_with_a_third_column_in_a_part_of_its_rows_is_refused_with_the_share(tmp_path):
    said = refusal(tmp_path, [*THREE[:60], *TWO[60:]])
    assert "a third column in 30% of its lines" in said
    assert refusal(tmp_path, [*THREE[:19], *TWO[19:]]) == ""
    assert refusal(tmp_path, [*THREE[:101], *TWO[101:]]) == ""


FOUR = [f"{n}\t{en}\t{zh}\tby A" for n, (en, zh) in enumerate(PAIRS)]


@pytest.mark.parametrize(("lines", "said", "command"), [
    (FOUR, "has 4 columns in most of its lines", "cut -f 2,3 "),
    ([f"{line}\t0.98" for line in FOUR], "has 5 columns", "cut -f 2,3 "),
    ([line + "\tx" * 9 for line in FOUR], "has 9 or more columns", "cut -f 2,3 "),
    ([f"{n}\t{line}" for n, line in enumerate(TWO)], "column 3 is the one in Chinese", "cut -f 2,3 "),
    ([f"{en}\t{n}\t{zh}" for n, (en, zh) in enumerate(PAIRS)], "column 3 is the one in Chinese", "cut -f 1,3 "),
    ([f"{en}\tDì {n} hào zài zhè lǐ.\t{zh}\tby A" for n, (en, zh) in enumerate(PAIRS)], "has 4 columns", ""),
])  # fmt: skip
def test_a_source_with_other_columns_is_refused_with_their_number_and_the_command_that_chooses(
    tmp_path, lines, said, command
):
    found = refusal(tmp_path, lines)
    assert said in found
    assert command in found
    if command:
        command = command + found.partition(command)[2]
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
        assert refusal(tmp_path, (tmp_path / "NEW.tsv").read_text(encoding="utf-8")) == ""


def test_two_tab_separated_files_are_no_pair(tmp_path):
    assert "name each tab-separated file alone" in refusal(tmp_path, TWO, TWO)
    assert "x1.tsv has TABs" in refusal(
        tmp_path, [en for en, _ in PAIRS], [f"{n}\t{zh}" for n, (_, zh) in enumerate(PAIRS)]
    )
    assert refusal(tmp_path, [en for en, _ in PAIRS], [zh + "\t" * (n < 9) for n, (_, zh) in enumerate(PAIRS)]) == ""


def test_another_pair_of_languages_is_told_which_setting_names_it(tmp_path):
    french = [f"The house number {n} is old.\tLa maison numéro {n} est vieille." for n in range(50)]
    said = refusal(tmp_path, french)
    assert "0% of column 2 (zh)" in said
    assert "--set 'clean.columns=[en,fr]' --set data.src=en --set data.tgt=fr" in said
    assert refusal(tmp_path, french, columns=("en", "fr")) == ""
    assert "clean.columns=[zh,en]" in refusal(tmp_path, [f"{zh}\t{en}" for en, zh in PAIRS])
    assert "is not the corpus it should be" in refusal(tmp_path, [f"{zh}\t{zh}" for _, zh in PAIRS])
    assert "has no text, only blank lines" in refusal(tmp_path, "\n \n\t\n")
    assert "no line with two columns" in refusal(tmp_path, "a song\nwithout columns\n")


# ── quoting ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def csv_cell(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


SAID = [(f'He said "number {n}".', f'他说"{n}号"。') for n in range(20)]
DIALOGUE = [
    '"Hello," he said.\t“你好。”他说。', '"Who can help?" "I can."\t“谁能帮忙？”“我能。”', 'He said "no".\t他说“不”。',
    '"Yes," he said, "I know."\t“是的，”他说，“我知道。”', '"Wait."\t“等等。”', 'It is 6" long.\t它有六英寸长。',
    '"Go!"\t"走！"', '"a" and "b"\t"一"和"二"', 'The "" is empty.\t这个""是空的。',
]  # fmt: skip
IN_PARTS = [f'"One\ttwo ""{n}"""\t一' for n in range(20)]
QUOTED = {
    "a few cells, as spreadsheets write them": [*TWO, *(f"{csv_cell(en)}\t{csv_cell(zh)}" for en, zh in SAID)],
    "one cell alone": [*TWO, '"He said: ""I know."""\t他说：“我知道。”'],
    "all cells": [f"{csv_cell(en)}\t{csv_cell(zh)}" for en, zh in PAIRS],
    "all cells, three columns": [f"{csv_cell(en)}\t{csv_cell(zh)}\t{csv_cell('by A')}" for en, zh in PAIRS],
    "the other side": [*TWO, *(f"He knows.\t{csv_cell(zh)}" for _, zh in SAID)],
    "a TAB inside, and another line": [*TWO, f"{csv_cell(SAID[0][0])}\t一", *IN_PARTS, '"One\ntwo"\t一二'],
}


@pytest.mark.parametrize("lines", QUOTED.values(), ids=QUOTED)
def test_quoting_of_csv_never_stays_in_the_text_and_the_command_that_is_named_takes_it_off(tmp_path, lines):
    said = refusal(tmp_path, lines)
    assert "quotes inside them doubled" in said
    command = "python3 -c" + said.partition("python3 -c")[2]
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    plain = (tmp_path / "NEW.tsv").read_text(encoding="utf-8")
    assert refusal(tmp_path, plain) == ""
    assert '""' not in plain
    assert "Number 7 is here.\t第7号在这里。" in plain


def test_a_part_with_quoting_in_a_file_with_quotations_is_refused_without_a_command_that_would_harm_them(tmp_path):
    part = [f"{csv_cell(en)}\t{csv_cell(zh)}" for en, zh in SAID]
    for lines in ([*DIALOGUE * 9, *TWO, *part], [*part, *DIALOGUE * 9], [*DIALOGUE * 9, *part, *DIALOGUE * 9]):
        said = refusal(tmp_path, lines)
        assert "convert that part before it is put together" in said
        assert "python3" not in said


@pytest.mark.parametrize("lines", [
    [*TWO, *DIALOGUE], DIALOGUE * 9, [*TWO, *DIALOGUE[:4], '"He said ""no""." '], [*TWO, '"Wait."\t“等等。”'],
    [f'"{en}"\t“{zh}”' for en, zh in PAIRS], ['"Wait."\t"等等。"'] * 3,
], ids=range(6))  # fmt: skip
def test_quotations_in_plain_text_are_no_quoting(tmp_path, lines):
    assert refusal(tmp_path, lines) == ""


@pytest.mark.parametrize(("mark", "quoted"), [(",", True), (",", False), (";", True), (";", False)])
def test_a_file_with_another_separator_is_refused_with_the_command_that_converts_it(tmp_path, mark, quoted):
    cell = csv_cell if quoted else str
    said = refusal(tmp_path, [f"{cell(en)}{mark}{cell(zh)}" for en, zh in PAIRS])
    assert f"separated by {mark!r}" in said
    subprocess.run("python3 -c" + said.partition("python3 -c")[2], shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "NEW.tsv").read_text(encoding="utf-8") == "".join(f"{line}\n" for line in TWO)


def test_a_given_set_is_held_to_the_same_shape(tmp_path):
    held = [("Good night.", "晚安。"), ("See you.", "再见。"), ("Hello.", "你好。")]
    lines = [f"{en}\t{zh}" for en, zh in held]
    for text, said in (
        ([*lines, "One two.\t一。\t二。"] * 4, "25% of its lines"),
        ([*lines * 9, "One two.\t一。\t二。"], "line 28 has 3 columns, most lines have 2"),
        ([*lines * 9, "One two."], "line 28 has 1 column, most lines have 2"),
        ([*lines, '"He said ""hi""."\t他说“嗨”。'], "quotes inside them doubled"),
        ([f"{zh}\t{en}" for en, zh in held], "in the order of clean.columns"),
    ):
        (tmp_path / "dev.tsv").write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
        given = (str(tmp_path / "dev.tsv"),)
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "x.tsv").write_text("".join(f"{line}\n" for line in TWO), encoding="utf-8")
        with pytest.raises(DataError, match=said):
            clean_corpus(
                {"x": (tmp_path / "x.tsv",)}, dataclasses.replace(SMALL, dev=given, test=given), tmp_path / "out"
            )


# ── other formats, and numbers in words ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("start", "what"), [
    (b'<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<tmx version="1.4">', "a TMX file"),
    (b'\xef\xbb\xbf<?xml version="1.0"?><tmx version="1.4"><header/>', "a TMX file"),
    (b"<tmx version='1.4'>", "a TMX file"),
    (b'<?xml version="1.0"?>\n<!-- made by hand -->\n<tmx>', "a TMX file"),
    (b'<?xml version="1.0"?><xliff version="1.2">', "an XML file"),
    (b"<!DOCTYPE html><p>log in", "a web page"),
    (b'<?xml version="1.0"?><!DOCTYPE html PUBLIC "x"><html>', "a web page"),
    (b"\n <html lang=en>", "a web page"),
    (b"\x1f\x8b\x08\x00", "packed with gzip"),
    (b"\xfd7zXZ\x00\x00", "packed with xz"),
    (b"BZh91AY", "packed with bzip2"),
    (b"PK\x03\x04", "a zip archive"),
    (b"%PDF-1.7", "a PDF"),
    (b"<b>Bold</b> text", ""),
    (b"PKs are ready.", ""),
    ("<x> Hello…".encode(), ""),
])  # fmt: skip
def test_a_file_of_another_format_is_named_by_it(tmp_path, start, what):
    found = foreign_format(start)
    assert (found[0] if found else "")[: len(what) or None] == what
    (tmp_path / "x.tsv").write_bytes(start + "\t一。\n".encode())
    if what:
        with pytest.raises(DataError, match=f"x.tsv is {what}"):
            inspect([tmp_path / "x.tsv"], SMALL)
    else:
        assert inspect([tmp_path / "x.tsv"], SMALL).rows == 1


def test_a_number_and_its_noun_agree():
    assert [counted(n, "line") for n in (0, 1, 2, 1000)] == ["0 lines", "1 line", "2 lines", "1,000 lines"]
    assert [counted(n, "prefix", "prefixes") for n in (1, 2)] == ["1 prefix", "2 prefixes"]


def test_a_layout_of_nothing_says_nothing():
    empty = Layout()
    assert (empty.lines, empty.columns, empty.with_third, empty.is_quoted) == (0, 0, 0.0, False)
    assert (empty.han_columns(), empty.longest_without_han()) == ([], 0)
