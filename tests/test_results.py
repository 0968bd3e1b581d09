"""The tables of the docs: only from finished runs of one clean commit, with the numbers that the runs have."""

import contextlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from forked import nmt
from nmt.errors import DataError
from nmt.io import read_lines, write_lines
from nmt.runs import opening

SCRIPTS = Path(__file__).parent.parent / "scripts"
RUN = Path("runs/tiny.en-zh")
CODE = {"commit": "c" * 40, "dirty": False}


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(SCRIPTS))
    import fixed_split
    import make_results

    yield {"results": make_results, "split": fixed_split}
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def street(pipeline_run, tmp_path, monkeypatch) -> Path:
    """A folder with a finished run of a clean commit, scored by the same."""
    folder = Path(shutil.copytree(pipeline_run, tmp_path / "street"))
    monkeypatch.setattr(opening, "source_code", lambda: CODE)
    change(
        folder, **CODE, command=["/bin/nmt", "run", "-c", "tiny.yaml", "--set", "clean.columns=[en, zh]"], earlier=[]
    )
    score_again(folder)
    return folder


def change(folder: Path, **facts) -> None:
    path = folder / RUN / "provenance.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def score_again(folder: Path, *words: str) -> None:
    shutil.rmtree(folder / RUN / "eval")
    ended = nmt(folder, "run", "-c", "tiny.yaml", *words)
    assert ended.code == 0, ended.told


def make(scripts, folder: Path, capsys, *words: str) -> list[str]:
    with contextlib.chdir(folder):
        scripts["results"].main(words or [f"own={RUN}"])
    return capsys.readouterr().out.split("\n")


def test_a_table_has_the_numbers_of_the_run_its_commit_signature_and_command(scripts, street, capsys):
    lines = make(scripts, street, capsys, f"own|split={RUN}")
    scores = json.loads((street / RUN / "eval/scores.json").read_text())
    final = json.loads((street / RUN / "final/state.json").read_text())
    bleu, chrf = scores["scores"]["bleu"], scores["scores"]["chrf"]
    train = len(read_lines(next((street / "data/mini").glob("clean-*")) / "train.en"))
    assert lines[0].startswith(f"Commit `{CODE['commit']}`; nmt ")
    dev, baseline = final["dev_scores"][final["made_of"]], scores["baseline"]["bleu"]["value"]
    whole = f"| {train:,} | 60 | 8 | {dev:.2f} | {bleu['value']:.2f} | {baseline:.2f} | {chrf['value']:.2f} |"
    assert lines[4] == rf"| own\|split | en→zh {whole}"
    for name, part in scores["parts"].items():
        (found,) = (line for line in lines if f": {name} |" in line)
        assert f"| {part['lines']} |" in found
        assert f"| {part['scores']['bleu']['value']:.2f} |" in found
    assert f"* en→zh, BLEU: `{bleu['signature']}`" in lines
    assert r"* own|split, en→zh: `nmt run -c tiny.yaml --set 'clean.columns=[en, zh]'`" in lines
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("|")}
    assert widths == {10}


def test_several_runs_are_rows_of_one_table(scripts, street, capsys):
    shutil.copytree(street / RUN, street / "runs/other")
    lines = make(scripts, street, capsys, f"one={RUN}", "two=runs/other")
    assert [line.split(" | ")[0] for line in lines if re.match(r"\| (one|two) ", line)] == ["| one", "| two"]
    assert sum(line.startswith("Commit") for line in lines) == 1


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"dirty": True}, "differs from its commit"),
        ({"dirty": None}, "differs from its commit"),
        ({"commit": None}, "of several commits"),  # It was scored by a known one.
        ({"commit": "d" * 40}, "of several commits"),
        ({"earlier": [{"commit": "d" * 40, "dirty": False}]}, "of several commits"),
        ({"earlier": [CODE | {"dirty": True}]}, "differs from its commit"),
        ({"earlier": [{}]}, "of several commits"),
    ],
)
def test_a_run_of_other_than_one_clean_commit_is_refused(scripts, street, capsys, facts, reason):
    change(street, **facts)
    with pytest.raises(DataError, match=reason):
        make(scripts, street, capsys)
    assert capsys.readouterr().out == ""


def test_runs_of_two_commits_make_no_table(scripts, street, capsys, monkeypatch):
    shutil.copytree(street / RUN, street / "runs/other")
    other = {"commit": "d" * 40, "dirty": False}
    change(street, **other)
    monkeypatch.setattr(opening, "source_code", lambda: other)
    score_again(street)
    assert make(scripts, street, capsys)
    with pytest.raises(DataError, match=r"the table is of several commits: c+, d+"):
        make(scripts, street, capsys, f"one={RUN}", "two=runs/other")


def test_scores_of_other_code_than_the_training_are_refused(scripts, street, capsys, monkeypatch):
    monkeypatch.setattr(opening, "source_code", lambda: {"commit": "d" * 40, "dirty": False})
    score_again(street)
    with pytest.raises(DataError, match="of several commits"):
        make(scripts, street, capsys)


@pytest.mark.parametrize("what", ["scores", "translation", "final model", "data"])
def test_a_run_that_is_not_up_to_date_is_refused(scripts, street, capsys, what):
    if what == "scores":
        shutil.rmtree(street / RUN / "eval")
    elif what == "translation":
        (street / RUN / "translate/test.hyp").write_text("another\n")
    elif what == "final model":
        assert nmt(street, "average", str(RUN), "--last", "1", "--force").code == 0
    else:
        with (street / "data/mini/raw/mini.txt").open("a") as stream:
            stream.write("One more.\t又一个。\tnobody\n")
    with pytest.raises(DataError, match="not up to date"):
        make(scripts, street, capsys)


def test_a_run_that_lies_elsewhere_is_refused(scripts, street, capsys):
    shutil.move(street / RUN, street / "elsewhere")
    with pytest.raises(DataError, match="is not in runs/"):
        make(scripts, street, capsys, "own=elsewhere")


@pytest.mark.parametrize("word", ["runs/x", "=runs/x", "own=", ""])
def test_a_word_that_is_no_split_and_run_is_refused(scripts, word):
    with pytest.raises(SystemExit) as ended:
        scripts["results"].main([word])
    assert ended.value.code == 2


# ── the fixed split ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_go_where_the_list_says_and_all_others_are_train(scripts):
    rows = [
        f"S{n}.\t貓{n}。\tCC-BY 2.0 (France) Attribution: tatoeba.org #{n} (CM) & #{n + 50} (x #9)" for n in range(6)
    ]
    rows = [row.replace(" #9", "") for row in rows]
    places = {("1", "51"): "dev", ("4", "54"): "test", ("2", "99"): "dev"}
    found = scripts["split"].split(rows, places)
    assert {name: [row[:2] for row in kept] for name, kept in found.items()} == {
        "train": ["S0", "S2", "S3", "S5"],
        "dev": ["S1"],
        "test": ["S4"],
    }
    assert found["dev"][0] == rows[1].replace("貓", "猫")


@pytest.mark.parametrize("row", ["a\tb", "a\tb\tno numbers", "a\tb\t#1 & #2 & #3", "", "a\tb\tc\t#1 & #2"])
def test_a_corpus_of_another_form_is_refused_with_its_line(scripts, row):
    with pytest.raises(DataError, match="line 2 "):
        scripts["split"].split(["a\tb\t#1 & #2", row], {})


def test_rows_that_are_gone_are_counted(scripts, tmp_path, capsys):
    write_lines(tmp_path / "cmn.txt", ["a\tb\t#1 & #2"])
    scripts["split"].main([str(tmp_path / "cmn.txt"), str(tmp_path / "raw")])
    assert "2,000 pairs of dev and test are not in" in capsys.readouterr().out


def test_the_fixed_split_is_the_one_of_the_experiments_to_the_byte(scripts, tmp_path, foreign_data, capsys):
    given = foreign_data / "cmn/split"
    if not given.is_dir():
        pytest.skip("there is no cmn/split in NMT_TEST_DATA")
    scripts["split"].main([str(foreign_data / "cmn/cmn.txt"), str(tmp_path)])
    assert "are not in" not in capsys.readouterr().out
    for name in ("train", "dev", "test"):
        rows = [row.split("\t") for row in read_lines(tmp_path / f"{name}.tsv")]
        assert [row[0] for row in rows] == read_lines(given / f"{name}.en")
        assert [row[1] for row in rows] == read_lines(given / f"{name}.zhs")
