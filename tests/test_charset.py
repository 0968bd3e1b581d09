"""Which encoding a file is in: right ones are read, wrong ones refused by the name of the right one."""

import random
import shlex
import subprocess
from pathlib import Path

import opencc
import pytest

from nmt import charset
from nmt.config import CleanConfig
from nmt.corpus.reading import inspect
from nmt.errors import DataError
from nmt.io import read_lines

MINI = Path(__file__).parent.parent / "data/mini/raw/mini.txt"
LATIN = ["Déjà vu à l'hôtel.\tSchöne Grüße aus Köln.", "Ça va très bien.\tDas wäre möglich.", "Où?\tÜber mir."]
ENCODINGS = ("utf-8", "gb18030", "big5", "big5-hkscs", "cp950", "utf-16", "utf-16-le", "utf-16-be", "utf-32")
DECLARED = ("utf-8", "gb18030", "gbk", "big5", "cp950", "big5hkscs", "latin-1", "cp1252", "shift_jis", "euc_jp")
FAMILY = {"gb18030": {"gb18030", "gbk"}} | {
    name: {"big5", "cp950", "big5hkscs"} for name in ("big5", "cp950", "big5-hkscs")
}
"""Encodings that read each other's common text rightly."""


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Pairs of the bundled corpus, Simplified and Traditional."""
    simplified = b"".join(MINI.read_bytes().splitlines(keepends=True)[:1500]).decode()
    return {"simplified": simplified, "traditional": opencc.OpenCC("s2tw").convert(simplified)}


def refusal(path: Path, encoding: str, **more) -> str:
    """Why a file is refused; empty if it is read."""
    try:
        inspect([path], CleanConfig(encoding=encoding, **more))
    except DataError as error:
        return str(error)
    return ""


# Text is in the encodings that have its characters, as whoever wrote it had them.
WRITTEN = [("simplified", name) for name in ENCODINGS if name not in ("big5", "big5-hkscs", "cp950")]
WRITTEN += [("traditional", name) for name in ENCODINGS]


@pytest.mark.parametrize(("script", "encoding"), WRITTEN)
def test_text_is_read_in_its_encoding_and_refused_by_its_name_in_any_other(texts, tmp_path, script, encoding):
    path = tmp_path / "x y.tsv"
    path.write_bytes(texts[script].encode(encoding, "ignore"))
    for declared in DECLARED:
        said = refusal(path, declared)
        if declared in FAMILY.get(encoding, {encoding}):
            assert said == "", declared
        else:
            named = {"cp950": "big5", "big5-hkscs": "big5", "utf-16-le": "utf-16", "utf-16-be": "utf-16"}.get(
                encoding, encoding
            )
            assert named in said.lower(), declared


@pytest.mark.parametrize(("script", "encoding"), [row for row in WRITTEN if row[1] != "utf-8"])
def test_the_command_that_a_refusal_names_makes_a_file_that_is_read(texts, tmp_path, script, encoding):
    path = tmp_path / "x y.tsv"
    path.write_bytes(texts[script].encode(encoding, "ignore"))
    command = "iconv" + refusal(path, "utf-8").partition("iconv")[2]
    assert shlex.quote(str(path)) in command
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert refusal(tmp_path / "NEW", "utf-8") == ""
    kept = texts[script].encode(encoding, "ignore").decode(encoding)
    assert (tmp_path / "NEW").read_text(encoding="utf-8").removeprefix("\ufeff") == kept


@pytest.mark.parametrize(("declared", "foreign"), [("gb18030", "big5"), ("big5hkscs", "gb18030"), ("gb18030", "utf-8")])
def test_a_part_in_another_encoding_is_found_wherever_it_stands(texts, tmp_path, declared, foreign):
    own, other = (texts[{"gb18030": "simplified"}.get(name, "traditional")] for name in (declared, foreign))
    other = "".join(other.splitlines(keepends=True)[:450])
    parts = [own.encode(declared, "ignore")] * 5
    for place in (0, 2, 5):
        mixed = b"".join([*parts[:place], other.encode(foreign, "ignore"), *parts[place:]])
        (tmp_path / "x.tsv").write_bytes(mixed)
        said = refusal(tmp_path / "x.tsv", declared)
        assert "x.tsv, line" in said, place
        assert place != 5 or foreign in said


def test_a_handful_of_lines_is_judged_too_and_very_few_characters_are_not(tmp_path):
    text = "Please come in.\t請進來坐一會兒。\nThat is his book.\t這本書是他寫的。\nThank you.\t謝謝你的幫忙。\n"
    text += "It rained all day yesterday.\t昨天整天都在下雨。\nI like to read.\t我喜歡看書，也喜歡聽音樂。\n"
    (tmp_path / "x.tsv").write_bytes(text.encode("big5"))
    assert "looks like big5" in refusal(tmp_path / "x.tsv", "gb18030", columns=("qaa", "qab"))
    assert charset.is_plausible(charset.FEWEST - 1, 0)
    assert not charset.is_plausible(charset.FEWEST, 15)
    assert charset.is_plausible(charset.FEWEST, 16)


@pytest.mark.parametrize(("encoding", "declared", "said"), [
    ("utf-8", "latin-1", "is UTF-8, not latin-1"),
    ("utf-8", "cp1252", "is UTF-8, not cp1252"),
    ("cp1252", "utf-8", "looks like cp1252"),
    ("latin-1", "utf-8", "looks like cp1252"),
    ("utf-16", "latin-1", "is UTF-16, not latin-1"),
    ("utf-16-le", "utf-8", "is UTF-16-LE, not utf-8"),
    ("utf-8", "utf-8", ""),
    ("latin-1", "latin-1", ""),
    ("cp1252", "cp1252", ""),
])  # fmt: skip
def test_languages_of_the_latin_script_are_told_apart_too(tmp_path, encoding, declared, said):
    (tmp_path / "x.tsv").write_bytes("".join(f"{line}\n" for line in LATIN * 9).encode(encoding))
    found = refusal(tmp_path / "x.tsv", declared, columns=("fr", "de"))
    assert said in found
    assert bool(said) == bool(found)


def test_a_nul_by_mistake_makes_no_utf_16_of_text(texts):
    for encoding in ("utf-8", "gb18030", "big5"):
        raw = bytearray(texts["traditional"].encode(encoding, "ignore"))
        for place in random.Random(1).sample(range(5000), 9):
            raw[place] = 0
        assert charset.utf_16(bytes(raw)) == "", encoding
    assert charset.utf_16(b"plain text\n" * 9) == ""
    assert charset.utf_16(b"") == ""


def test_english_alone_in_utf_16_is_seen_though_it_is_valid_utf_8():
    text = "The bush hid the facts.\n" * 9
    assert charset.utf_16(text.encode("utf-16-le")) == "utf-16-le"
    assert charset.utf_16(text.encode("utf-16-be")) == "utf-16-be"
    assert charset.likely_encoding(text.encode()) == ""


def test_the_table_of_common_characters_has_the_levels_of_the_standards():
    common = charset.common_characters()
    assert 7_000 < len(common) < 7_400
    assert all(sign in common for sign in "的是不我一有大在人了國国會会說说働込")
    assert not any(sign in common for sign in "龘鱻嚞燚\ue000𠀀")
    # The first level of GB 2312 is what is between 啊 and 座 in it, of Big5 between 一 and 籲.
    assert sum(0xB0A1 <= int.from_bytes(c.encode("gb2312", "ignore") or b"\0") <= 0xD7F9 for c in common) == 3755
    assert sum(0xA440 <= int.from_bytes(c.encode("big5", "ignore") or b"\0") <= 0xC67E for c in common) == 5401


def test_held_out_and_other_text_in_another_encoding_is_refused_by_its_name_as_well(texts, tmp_path):
    for encoding in ("gb18030", "big5", "utf-16"):
        (tmp_path / "x").write_bytes(texts["traditional"].encode(encoding, "ignore"))
        with pytest.raises(
            DataError, match=rf"line 1 is not UTF-8.*looks like {encoding}.*iconv -f {encoding.upper()} "
        ):
            read_lines(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"good\n" * 999 + b"\xff\n")
    with pytest.raises(DataError, match=r"line 1000 is not UTF-8; convert the file first\.$"):
        read_lines(tmp_path / "x")


def test_human_text_is_always_plausible_and_never_in_the_other_encoding(foreign_data, tmp_path):
    lines = read_lines(foreign_data / "cmn" / "cmn.txt")
    for encoding, other in (("gb18030", "big5"), ("big5", "gb18030")):
        raw = [line.encode(encoding, "ignore") for line in lines]
        (tmp_path / "x.tsv").write_bytes(b"\n".join(raw))
        assert refusal(tmp_path / "x.tsv", encoding) == ""
        assert f"looks like {encoding}" in refusal(tmp_path / "x.tsv", other)
        shares = [
            common / han
            for start in range(0, len(raw) - 1000, 1000)
            for han, common in [charset.count_han(b"\n".join(raw[start : start + 1000]).decode(other, "replace"))]
        ]
        assert max(shares) < charset.LEAST_COMMON - 0.05
