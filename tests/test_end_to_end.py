"""The whole street, as a stranger walks it: a tiny recipe on the bundled corpus; the demo itself is a slow test."""

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nmt import config
from nmt.io import read_lines
from nmt.pipeline import engine, stages

ROOT = Path(__file__).parent.parent
TINY = """
data: {corpus: mini}
clean: {dev_size: 40, test_size: 60}
bpe: {vocab_size: 1200}
model: {layers: 1, d_model: 32, d_ff: 64, heads: 2}
optim: {warmup_steps: 4}
train: {batch_tokens: 1000, max_steps: 8, validate_every: 4, validate_sentences: 4, save_every: 4}
runtime: {device_tokens: 1000}
translate: {beam: 2, max_length_offset: 4}
eval: {bootstrap: 20}
"""
STAGES = ["clean", "bpe", "encode", "train", "translate", "eval"]


def nmt(folder: Path, *words: str, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `nmt` in `folder` and see that it ends with `code`."""
    done = subprocess.run(
        [sys.executable, "-m", "nmt", *words],
        cwd=folder,
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def states(folder: Path, *changes: str) -> dict[str, str]:
    """How things stand with each stage, asked for in this process."""
    with contextlib.chdir(folder):
        found = engine.status(stages.build_stages(config.load("tiny.yaml", changes)))
    return {state.stage.name: state.word for state in found}


def fresh_clone(folder: Path) -> Path:
    shutil.copytree(ROOT / "data/mini/raw", folder / "data/mini/raw")
    (folder / "tiny.yaml").write_text(TINY)
    return folder


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the street was walked once."""
    folder = fresh_clone(tmp_path_factory.mktemp("street"))
    done = nmt(folder, "run", "-c", "tiny.yaml")
    assert "BLEU" in done.stdout
    assert "baseline" in done.stdout
    assert "tok:zh" in done.stdout
    return folder


def test_a_second_walk_says_that_all_six_are_fresh_in_under_five_seconds_without_torch(walked: Path) -> None:
    program = (
        "import sys\nfrom nmt.cli import main\n"
        "sys.argv = ['nmt', 'run', '-c', 'tiny.yaml']\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], cwd=walked, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Time of this process alone, so that a busy machine doesn't matter.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    *told, torch_was_loaded = done.stderr.strip().split("\n")
    assert [line.split(" (")[0] for line in told] == [f"{name}: up to date" for name in STAGES]
    assert torch_was_loaded == "False"


def test_translations_and_scores_are_of_the_test_set(walked: Path) -> None:
    (clean,) = (walked / "data/mini").glob("clean-*")
    run = walked / "runs/tiny.en-zh"
    assert len(read_lines(run / "translate/test.hyp")) == len(read_lines(clean / "test.en")) == 60
    scores = json.loads((run / "eval/scores.json").read_text(encoding="utf-8"))
    assert scores["lines"] == 60
    assert scores["baseline"]["bleu"]["value"] > 0
    assert any("grammar" in part for part in scores["parts"])
    assert sum(part["lines"] for part in scores["parts"].values()) == 60


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        ("runtime.log_every=5", set()),
        ("runtime.device_tokens=500", set()),
        ("translate.batch_tokens=500", set()),
        ("train.save_every=2", {"train", "translate", "eval"}),
        ("clean.sources={mini: data/mini/raw/mini.txt}", set()),
        ("clean.sources={dev: data/mini/raw/mini.txt}", set(STAGES)),
        ("eval.bootstrap=10", {"eval"}),
        ("translate.beam=1", {"translate", "eval"}),
        ("train.max_steps=9", {"train", "translate", "eval"}),
        ("model.dropout=0.2", {"train", "translate", "eval"}),
        ("bpe.dropout=0.1", {"train", "translate", "eval"}),
        ("encode.max_tokens=40", {"encode", "train", "translate", "eval"}),
        ("bpe.vocab_size=1100", {"bpe", "encode", "train", "translate", "eval"}),
        ("clean.max_words=50", set(STAGES)),
    ],
)
def test_a_changed_setting_makes_its_stage_and_what_follows_stale(walked: Path, change: str, stale: set[str]) -> None:
    found = states(walked, change)
    assert {name for name, state in found.items() if state != "up_to_date"} == stale


def test_the_order_of_sources_decides_which_of_equal_pairs_is_kept_and_so_the_stage(tmp_path: Path) -> None:
    folder = fresh_clone(tmp_path)
    for name, form in (("a", str), ("b", str.upper)):
        rows = [form(f"Number {n} is here.\t第{n}号在这里。\n") for n in range(700)]
        (folder / f"{name}.tsv").write_text("".join(rows), encoding="utf-8")
    orders = ["clean.sources={a: a.tsv, b: b.tsv}", "clean.sources={b: b.tsv, a: a.tsv}"]
    found = []
    for order in orders:
        nmt(folder, "clean", "-c", "tiny.yaml", "--set", order)
        with contextlib.chdir(folder):
            made = stages.build_stages(config.load("tiny.yaml", [order]))[0].writes.resolve()
        found.append((made / "train.en").read_text(encoding="utf-8"))
    assert found[0] != found[1]
    assert found[1].isupper()


def test_status_says_why(walked: Path) -> None:
    told = nmt(walked, "status", "-c", "tiny.yaml", "--set", "bpe.vocab_size=1100").stdout.split("\n")
    assert told[1] == "bpe: out of date, bpe.vocab_size: 1200 -> 1100"
    assert told[2] == "encode: blocked by bpe"


def test_the_other_direction_shares_the_data(walked: Path) -> None:
    found = states(walked, "data.src=zh", "data.tgt=en")
    assert [name for name, state in found.items() if state == "up_to_date"] == STAGES[:3]


def test_text_goes_through_line_by_line(walked: Path) -> None:
    done = nmt(walked, "translate", stdin="The cat is here.\n\nGood morning!\n")
    lines = done.stdout.removesuffix("\n").split("\n")
    assert len(lines) == 3
    assert lines[1] == ""
    assert "runs/tiny.en-zh" in done.stderr
    (walked / "out.txt").write_text("mine")
    assert "--force" in nmt(walked, "translate", "-o", "out.txt", stdin="Hello.\n", code=2).stderr
    assert (walked / "out.txt").read_text() == "mine"


def test_eval_scores_the_newest_run_other_text_and_compares(walked: Path) -> None:
    (clean,) = (walked / "data/mini").glob("clean-*")
    done = nmt(walked, "eval", "--json")
    assert json.loads(done.stdout)["lines"] == 60
    assert "runs/tiny.en-zh" in done.stderr
    test = str(clean / "test.zh")
    assert json.loads(nmt(walked, "eval", test, "--json").stdout)["scores"]["bleu"]["value"] == pytest.approx(100)
    against = nmt(walked, "eval", test, "--ref", test, "--tgt", "zh").stdout
    assert "BLEU: 100.00" in against
    assert "tok:zh" in against
    assert "--tgt" in nmt(walked, "eval", test, "--ref", test, code=2).stderr
    assert "p = " in nmt(walked, "eval", "runs/tiny.en-zh/translate/test.hyp", test).stdout


def test_the_references_of_a_line_may_stand_with_tabs_between_as_clean_writes_them(tmp_path: Path) -> None:
    for name, text in {
        "hyp": "你好。\n再见吧。\n我很好，谢谢。\n",
        "tabs": "你好。\t您好。\n回头见。\t再见吧。\n我很好，谢谢。\n",
        "one": "你好。\n回头见。\n我很好，谢谢。\n",
        "two": "您好。\n再见吧。\n我很好，谢谢。\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    words = ["eval", "hyp", "--tgt", "zh", "--json"]
    tabs = json.loads(nmt(tmp_path, *words, "--ref", "tabs").stdout)
    files = json.loads(nmt(tmp_path, *words, "--ref", "one", "--ref", "two").stdout)
    assert tabs["bleu"]["value"] == files["bleu"]["value"] == pytest.approx(100)
    (both,) = {json.loads(nmt(tmp_path, *words, "--src", "hyp", "--ref", name).stdout)["scores"]["bleu"]["value"]
               for name in ("tabs", "one")}  # fmt: skip
    assert both < 90  # The first reference alone.


def test_a_table_of_translations_is_not_scored_as_if_it_were_text(walked: Path) -> None:
    (clean,) = (walked / "data/mini").glob("clean-*")
    test = str(clean / "test")
    nmt(walked, "translate", f"{test}.en", "--scores", "-o", "table.tsv")
    for words in ([], ["--ref", f"{test}.zh", "--tgt", "zh"]):
        assert "cut -f 4 table.tsv" in nmt(walked, "eval", "table.tsv", *words, code=1).stderr


def test_a_final_model_of_a_training_that_goes_on_is_warned_of(walked: Path, tmp_path: Path) -> None:
    status = walked / "runs/tiny.en-zh/status.json"
    before = status.read_bytes()
    try:
        status.write_text(json.dumps(json.loads(before) | {"state": "preempted", "step": 13}))
        for command in ("translate", "eval"):
            told = nmt(walked, command, "--run", "runs/tiny.en-zh", stdin="Hello.\n").stderr
            assert "has not ended (preempted, step 13); its final model (" in told
    finally:
        status.write_bytes(before)
    assert "not ended" not in nmt(walked, "translate", "--run", "runs/tiny.en-zh", stdin="Hello.\n").stderr


@pytest.mark.parametrize(
    "changes", ["clean.seed=2", "data.src=zh & data.tgt=en", "model.layers=9", "bpe.vocab_size=1100", "data.corpus=cmn"]
)
def test_a_setting_that_contradicts_the_training_of_a_run_is_refused(walked: Path, changes: str) -> None:
    words = [word for change in changes.split(" & ") for word in ("--set", change)]
    (walked / "line").write_text("Hello.\n")
    scores = (walked / "runs/tiny.en-zh/eval/scores.json").read_bytes()
    for command in (["eval"], ["eval", "line"], ["translate"], ["score", "line", "line"]):
        told = nmt(walked, *command, *words, stdin="Hello.\n", code=2).stderr
        assert "runs/tiny.en-zh was trained with other settings" in told
        assert changes.partition("=")[0] in told
    assert (walked / "runs/tiny.en-zh/eval/scores.json").read_bytes() == scores
    nmt(walked, "translate", "--set", "translate.beam=1", "--set", "model.layers=1", stdin="Hello.\n")


def test_weights_to_begin_with_are_never_left_out_unsaid_where_the_run_is_finished(
    walked: Path, tmp_path: Path
) -> None:
    run = walked / "runs/tiny.en-zh"
    other = shutil.copytree(run, tmp_path / "other")
    before = (run / "final/manifest.json").read_bytes()
    told = nmt(walked, "train", "-c", "tiny.yaml", "--processes", "1", "--init-from", str(other), code=2).stderr
    assert "it did not begin with the weights that --init-from names" in told
    assert (run / "final/manifest.json").read_bytes() == before
    assert set(states(walked).values()) == {"up_to_date"}


def test_info_and_plan_know_the_run(walked: Path) -> None:
    facts: dict[str, Any] = json.loads(nmt(walked, "info", "--json").stdout)
    assert (facts["state"], facts["step"], facts["vocabulary"]) == ("finished", 8, {"en": 1200, "zh": 1200})
    plan = json.loads(nmt(walked, "plan", "-c", "tiny.yaml", "--json").stdout)
    assert plan["parameters"]["total"] == facts["parameters"]
    assert plan["data"]["exact"]


@pytest.mark.slow
def test_train_makes_what_is_missing_and_several_processes_share_it(tmp_path: Path) -> None:
    folder = fresh_clone(tmp_path)
    done = nmt(folder, "train", "-c", "tiny.yaml", "--processes", "2")
    assert "clean: done" in done.stderr
    assert set(states(folder)) == set(STAGES)
    assert [name for name, state in states(folder).items() if state == "up_to_date"] == STAGES[:4]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nmt"]
    subprocess.run(
        [*torchrun, "train", "-c", "tiny.yaml", "--set", "train.max_steps=12"], cwd=folder, env=environment, check=True
    )
    assert json.loads((folder / "runs/tiny.en-zh/status.json").read_text())["step"] == 12
    assert "up to date" in nmt(folder, "train", "-c", "tiny.yaml", "--set", "train.max_steps=12").stderr
    measured = json.loads(nmt(folder, "plan", "-c", "tiny.yaml", "--measure", "--json").stdout)["measured"]
    assert measured["seconds_a_step"] > 0
    averaged = nmt(folder, "average", "runs/tiny.en-zh", "--last", "2")
    assert "on the whole dev set: average of 2 has " in averaged.stderr
    nmt(folder, "translate", stdin="Hello.\n")


@pytest.mark.slow
def test_the_commands_of_the_readme_work_as_typed(tmp_path: Path) -> None:
    # Recipes of the same names, but tiny, stand before the real ones; a file stands for the network.
    (tmp_path / "configs").mkdir()
    for recipe in (ROOT / "configs").glob("*.yaml"):
        (tmp_path / "configs" / recipe.name).write_text(TINY.replace("corpus: mini", "corpus: cmn"))
    (tmp_path / "input.txt").write_text("Good morning!\nThe cat is here.\n")
    blocks = re.findall(
        r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    # `make` and the activation of its environment are what this test runs in.
    lines = [line for line in "".join(blocks).split("\n") if not line.startswith(("make ", "source "))]
    mini = ROOT / "data/mini/raw/mini.txt"
    script = (
        "\n".join(lines).replace("nmt fetch cmn", f"nmt fetch cmn --from {mini}").replace("per-node 8", "per-node 2")
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script], cwd=tmp_path, env=os.environ | {"PATH": path}, check=True
    )
    assert len(read_lines(tmp_path / "output.txt")) == 2
    assert (tmp_path / "runs/cmn-small.en-zh/eval/scores.json").is_file()
    assert (tmp_path / "runs/base.en-zh/final").is_dir()


@pytest.mark.slow
def test_the_demo_learns_its_grammar(tmp_path: Path) -> None:
    folder = fresh_clone(tmp_path)
    begun = time.perf_counter()
    result = json.loads(nmt(folder, "run", "-c", "demo", "--json").stdout)
    assert time.perf_counter() - begun < 600  # Alone on two cores it takes less than five minutes.
    (grammar,) = (part for name, part in result["parts"].items() if "grammar" in name)
    bleu, baseline = grammar["scores"]["bleu"], grammar["baseline"]["bleu"]
    assert "tok:zh" in bleu["signature"]
    assert bleu["value"] >= 80
    assert bleu["value"] >= baseline["value"] + 25
