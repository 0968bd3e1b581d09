"""nmt doctor: every proof passes on the bundled corpus, and fails where the thing that it proves is broken."""

import contextlib
import io
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import sentencepiece
import torch
from typer.testing import CliRunner

from nmt import config as settings
from nmt.cli import app
from nmt.data.bpe_dropout import SPACE
from nmt.data.tokenizer import Tokenizer
from nmt.decoding.options import Translation
from nmt.diagnostics import doctor, trial_runs
from nmt.diagnostics.doctor import EDGE_CASES, Check, judge_losses, judge_text, judge_translations
from nmt.diagnostics.trial_runs import TrialRuns
from nmt.distributed import host
from nmt.distributed.launcher import family
from nmt.errors import DataError, NmtError
from nmt.model.transformer import Transformer
from nmt.pipeline import engine, stages

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
PROOFS = ["resume", "ranks", "decode", "tokenizer"]
TEXT = {"en": ["The cat sat on the mat.", "Where is my book?"] * 5, "zh": ["猫坐在垫子上。", "我的书在哪里？"] * 5}

# What stands before `nmt` in a training that is broken; the rest of the command is as it is.
FAULTS = {
    "nothing": "",
    "the optimizer's moments are lost": "checkpoint.restore_optimizer = lambda *_: None",
    "the place in the data is lost": (
        "whole = checkpoint._read\n"
        "checkpoint._read = lambda folder: (whole(folder)[0], whole(folder)[1] | {'update': 0})"
    ),
    "checkpoints are not found": "checkpoint.load_newest = lambda *_: None",
    "weights are kept in half precision": (
        "whole = checkpoint._read\n"
        "half = lambda weights: {name: weight.half().float() for name, weight in weights.items()}\n"
        "checkpoint._read = lambda folder: (half(whole(folder)[0]), whole(folder)[1])"
    ),
    "each process takes its own mean": """
import torch
forward = step.TrainingModel.forward
def of_own_tokens(self, src, tgt, out, real):
    loss, nll = forward(self, src, tgt, out, real)
    if not self.model.training or not torch.distributed.is_initialized():
        return loss, nll
    every = torch.tensor(float(len(real)))
    torch.distributed.all_reduce(every)
    factor = every.item() / len(real) / torch.distributed.get_world_size()
    return loss.detach() + factor * (loss - loss.detach()), nll
step.TrainingModel.forward = of_own_tokens
""",
    "the second process fails": """
import os, sys
if os.environ.get('RANK') == '1':
    sys.exit('I am broken.')
""",
}
PROGRAM = """
import os, sys
if "--processes" in sys.argv:
    at = sys.argv.index("--processes")
    processes, words = sys.argv[at + 1], [*sys.argv[:at], *sys.argv[at + 2:]]
    if processes != "1":  # This very program in two processes, whatever nmt's own launcher would do.
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
        os.execv(sys.executable, [sys.executable, *launcher, *words])
from nmt.runs import checkpoint
from nmt.training import step
{fault}
from nmt.cli import main
main()
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundled corpus and nothing else."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "data/mini/raw", folder / "data/mini/raw")
    return folder


@pytest.fixture(scope="module")
def walked(clone: Path) -> list[engine.Stage]:
    """The street of the demo in that folder, with its data made."""
    with contextlib.chdir(clone):
        return engine.run(partial(stages.build_stages, settings.load("demo")), "encode")


@pytest.fixture
def bench(clone: Path, walked: list[engine.Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialRuns:
    """A bench for tiny trainings of the demo."""
    monkeypatch.chdir(clone)
    return TrialRuns(tmp_path, ["-c", "demo", "--device", "cpu"])


def broken(bench: TrialRuns, fault: str) -> TrialRuns:
    """The bench with a training that has this fault."""
    path = bench.folder / "broken.py"
    path.write_text(PROGRAM.format(fault=FAULTS[fault]), encoding="utf-8")
    return TrialRuns(bench.folder, bench.words, [sys.executable, str(path)])


# ── what is compared ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("alone", "shared", "outcome"),
    [
        ([5.0, 4.0], [5.0, 4.0], "passed"),
        ([5.0, 4.0], [5.0, 4.0 + 9e-6], "passed"),
        ([5.0, 4.0], [5.0 + 1.1e-5, 4.0], "failed"),
        ([5.0, 4.0], [math.nan, 4.0], "failed"),
        ([5.0, 4.0], [5.0, math.nan], "failed"),
        ([5.0, 4.0], [5.0], "failed"),
        ([], [], "failed"),
    ],
)
def test_losses_may_differ_by_a_hundred_thousandth(alone: list[float], shared: list[float], outcome: str) -> None:
    assert judge_losses(alone, shared, "here").outcome == outcome


def translations(count: int, **changed: float | str) -> list[Translation]:
    """So many translations, the last one with something changed."""
    found = [Translation(f"第{i}行", -float(i), -float(i), True) for i in range(count)]
    return [*found[:-1], found[-1]._replace(**changed)] if changed else found


@pytest.mark.parametrize(
    ("lines", "together", "outcome"),
    [
        (100, translations(100), "passed"),
        (100, translations(100, score=-99.0005), "passed"),
        (100, translations(100, score=-99.01), "failed"),
        (100, translations(100, score=math.nan), "failed"),
        (100, translations(100, text="别的"), "failed"),
        (2000, translations(2000, text="别的"), "passed"),
        (100, translations(100)[:-1], "failed"),
        (100, translations(101), "failed"),
        (100, translations(100)[::-1], "failed"),
    ],
)
def test_a_thousandth_of_the_texts_may_differ_but_no_line_may_be_lost(
    lines: int, together: list[Translation], outcome: str
) -> None:
    assert judge_translations(lines, translations(lines), together).outcome == outcome


def test_text_that_does_not_come_back_is_named() -> None:
    assert judge_text({"en": ["a", "b"]}, {"en": ["a", "b"]}) == Check("passed", "2 lines, 0 changed")
    assert (
        judge_text({"en": ["a", "b "]}, {"en": ["a", "b"]}).figure == "2 lines, 1 changed (the first is line 2 of en)"
    )
    assert judge_text({"en": ["a", "b"]}, {"en": ["a"]}).outcome == "failed"


# ── the tokenizer ───────────────────────────────────────────────────────────────────────────────────────────────────


def learnt(**wanted: object) -> Tokenizer:
    """A small vocabulary, as nmt learns it but for what is wanted otherwise."""
    faithful = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter([line for side in TEXT.values() for line in side]), model_writer=model, model_type="bpe",
        pad_id=0, unk_id=1, bos_id=2, eos_id=3, minloglevel=2,
        **({"byte_fallback": True, "vocab_size": 320} | faithful | wanted),
    )  # fmt: skip
    return Tokenizer(model.getvalue(), "joint.model")


@pytest.mark.parametrize(
    ("wanted", "outcome"),
    [
        ({}, "passed"),
        ({"remove_extra_whitespaces": True}, "failed"),
        ({"normalization_rule_name": "nmt_nfkc"}, "failed"),
        ({"byte_fallback": False, "vocab_size": 60}, "failed"),
    ],
    ids=["faithful", "loses spaces", "rewrites marks", "does not know a character"],
)
def test_a_tokenizer_must_give_every_line_back(wanted: dict[str, object], outcome: str) -> None:
    tokenizer = learnt(**wanted)
    assert doctor.check_tokenizer_round_trip(dict.fromkeys(TEXT, tokenizer), TEXT).outcome == outcome
    # A corpus that has none of the hard things would not have shown it.
    assert tokenizer.decode(tokenizer.encode(TEXT["en"])) == TEXT["en"]


def test_the_nasty_lines_are_within_what_a_tokenizer_promises() -> None:
    assert not any(SPACE in line or "\n" in line for line in EDGE_CASES)
    assert len(set(EDGE_CASES)) == len(EDGE_CASES)


# ── trainings that are broken ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "outcome", "told"),
    [
        ("nothing", "passed", "resumed from step-000000"),
        ("the optimizer's moments are lost", "failed", "weights differ by up to"),
        ("the place in the data is lost", "failed", "weights differ by up to"),
        ("weights are kept in half precision", "failed", "weights differ by up to"),
        ("checkpoints are not found", "failed", "restarted instead of resuming"),
    ],
)
def test_a_training_that_is_killed_must_go_on_to_the_same_weights(
    bench: TrialRuns, fault: str, outcome: str, told: str
) -> None:
    found = doctor.check_resume(broken(bench, fault), random.Random(1))
    assert (found.outcome, told in found.figure) == (outcome, True), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "outcome", "told"),
    [
        ("nothing", "passed", "losses of 24 steps"),
        ("each process takes its own mean", "failed", "losses of 24 steps"),
        ("the second process fails", "failed", "a training ended with 1"),
    ],
)
def test_two_processes_must_have_the_losses_of_one(bench: TrialRuns, fault: str, outcome: str, told: str) -> None:
    found = doctor.run_check("ranks", partial(doctor.check_ranks, broken(bench, fault), CPU))
    assert (found.outcome, told in found.figure) == (outcome, True), found


@pytest.mark.slow
def test_a_translation_must_not_depend_on_its_neighbours(
    bench: TrialRuns, walked: list[engine.Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [*doctor._some_lines(walked[0].writes / "dev.en", 70), ""]
    translate = partial(doctor.at_batch, bench.train("whole"), "cpu")
    assert doctor.check_decode(translate, lines).outcome == "passed"
    lost = doctor.check_decode(lambda texts, size: translate([text for text in texts if text], size), lines)
    assert lost.figure == "71 lines became 70 one by one, 70 at batch 64"
    encode = Transformer.encode
    # Padding is looked at like words.
    monkeypatch.setattr(Transformer, "encode", lambda self, src: (encode(self, src.clamp_min(1))[0], None))
    seen = doctor.check_decode(translate, lines)
    assert seen.outcome == "failed"


def test_a_training_has_as_many_processes_as_the_proof_is_about(tmp_path: Path) -> None:
    bench = TrialRuns(tmp_path, [], [sys.executable, "-c", "import sys; print(*sys.argv)"])
    bench.train("alone")
    assert "--processes 1" in (tmp_path / "alone.log").read_text()
    bench.train("shared", processes=2)
    assert "--processes 2" in (tmp_path / "shared.log").read_text()


def test_without_gloo_the_processes_are_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "backends", lambda: {"gloo": False, "nccl": False})
    found = doctor.check_ranks(TrialRuns(tmp_path, [], ["/nowhere"]), CPU)
    assert (found.outcome, "no gloo" in found.figure) == ("not run", True)


def test_what_goes_wrong_in_a_proof_is_its_result_but_an_interruption_is_none() -> None:
    def breaks(error: BaseException) -> Check:
        raise error

    assert doctor.run_check("x", lambda: breaks(DataError("no text."))) == Check("failed", "no text.")
    assert doctor.run_check("x", lambda: breaks(KeyError("a"))) == Check("failed", "KeyError: 'a'")
    with pytest.raises(KeyboardInterrupt):
        doctor.run_check("x", lambda: breaks(KeyboardInterrupt()))


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo first; echo 'no space left'; echo =====; exit 1", "a training ended with 1: no space left"),
        ("exit 2", "a training ended with 2: it said nothing"),
        ("kill -SEGV $$", "a training was ended by signal 11, after 600 s at the latest: it said nothing"),
    ],
)
def test_a_training_that_fails_is_told_with_its_last_words(tmp_path: Path, script: str, told: str) -> None:
    bench = TrialRuns(tmp_path, [], ["sh", "-c", script])
    for attempt in (lambda: bench.train("a"), lambda: bench.kill("b", 1, 0)):
        with pytest.raises(NmtError) as caught:
            attempt()
        assert str(caught.value) == told


def test_a_training_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_runs, "LIMIT", 0.3)
    bench = TrialRuns(tmp_path, [], ["sh", "-c", "sleep 60; sleep 60"])
    for attempt in (lambda: bench.train("a"), lambda: bench.kill("b", 1, 0)):
        with pytest.raises(NmtError, match=r"ended by signal 9, after 0\.3 s"):
            attempt()


# ── processes that are left ─────────────────────────────────────────────────────────────────────────────────────────


def ends(pid: int) -> bool:
    """Whether a process is gone, or will be within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def grown(pid: int, size: int) -> list[int]:
    """A process with all that it has started, once they are so many."""
    deadline = time.monotonic() + 120
    while len(found := family(pid)) < size:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def test_the_family_of_a_process_are_its_children_and_theirs() -> None:
    with subprocess.Popen(["sh", "-c", "sh -c 'sleep 60 & sleep 60; true' & sleep 60; true"]) as process:
        found, end, names = grown(process.pid, 5), time.monotonic() + 60, [""]
        while sorted(names) != ["sh", "sh", "sleep", "sleep", "sleep"] and time.monotonic() < end:
            # A shell forks first, and its child has its name until it becomes another program.
            names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in found]
        for pid in found:
            os.kill(pid, signal.SIGKILL)
    assert found[0] == process.pid
    assert sorted(names) == ["sh", "sh", "sleep", "sleep", "sleep"]


@pytest.mark.slow
def test_no_process_of_a_training_outlives_its_block(bench: TrialRuns) -> None:
    with contextlib.suppress(KeyboardInterrupt), bench.training("shared", processes=2) as process:
        found = grown(process.pid, 3)
        raise KeyboardInterrupt
    assert all(ends(pid) for pid in found)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_doctor_leaves_neither_processes_nor_files(
    clone: Path, walked: list[engine.Stage], tmp_path: Path, number: int, code: int
) -> None:
    command = [sys.executable, "-m", "nmt", "doctor"]
    with subprocess.Popen(
        command,
        cwd=clone,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # What a shell starts in the background ignores Ctrl-C, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        found = grown(process.pid, 2)
        process.send_signal(number)
        assert b"Traceback" not in process.communicate()[1]
    assert process.returncode == code
    assert all(ends(pid) for pid in found)
    assert list(tmp_path.iterdir()) == []


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────

VERSIONS = ["python", "nmt", "torch", "sentencepiece", "sacrebleu", "safetensors", "numpy"]
KEYS = ["versions", "platform", "cores", "threads", "bfloat16", "memory", "devices", "backends", "disk_free",
        "shared_memory", "device", "exact", "recipe", "corpus", "direction", "proofs", "passed"]  # fmt: skip


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (("passed", "passed"), 0),
        (("passed", "not run"), 0),
        (("failed", "passed"), 1),
        (("not run", "failed"), 1),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_failed_proof_is_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, outcomes: tuple[str, str], code: int, as_json: bool
) -> None:
    found = {name: Check(outcome, "a figure", 1.5) for name, outcome in zip(PROOFS, outcomes, strict=False)}
    monkeypatch.setattr(doctor, "run_checks", lambda *_: found)
    monkeypatch.setattr(engine, "run", lambda build, upto: build())
    done = CliRunner().invoke(app, ["doctor", "-c", "demo", "--device", "cpu", *(["--json"] if as_json else [])])
    assert done.exit_code == code
    if as_json:
        facts = json.loads(done.stdout)
        assert list(facts) == KEYS
        assert list(facts["versions"]) == VERSIONS
        assert facts["proofs"]["resume"] == {"outcome": outcomes[0], "figure": "a figure", "seconds": 1.5}
        assert facts["passed"] == (code == 0)
        assert facts["exact"]["expected"] is True
    else:
        assert [line for line in done.stdout.split("\n") if line.startswith("versions")]
        assert f"ranks      {outcomes[1]:<8}    1.5 s  a figure" in done.stdout


def test_in_an_empty_folder_it_takes_the_corpus_that_ships_with_nmt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "run_checks", lambda *_: {name: Check("passed", "") for name in PROOFS})
    done = CliRunner().invoke(app, ["doctor", "--json", "--device", "cpu"])
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["corpus"] == "mini"


def test_without_the_corpus_of_a_recipe_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["doctor", "-c", "cmn-small"])
    assert isinstance(done.exception, DataError)
    assert "nmt fetch cmn" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_the_cores_are_those_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert host.describe(CPU)["cores"] == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("flags : fpu avx512f avx512_bf16 amx_bf16", "amx_bf16"),
        ("flags : fpu avx512f avx512_bf16", "avx512_bf16"),
        ("Features : fp asimd bf16", "bf16"),
        ("flags : fpu avx2 xbf16x", None),
    ],
)
def test_whether_a_cpu_is_fast_in_bfloat16_is_read_from_its_flags(tmp_path: Path, flags: str, found: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert host.fast_bfloat16(tmp_path / "cpuinfo") == found
    assert host.fast_bfloat16(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("flags", "slow"),
    [
        ("flags : fpu avx2 fma f16c", {"bfloat16", "float16"}),
        ("flags : fpu avx512f avx512_bf16", {"float16"}),
        ("flags : fpu avx512f avx512_bf16 avx512_fp16", set()),
        ("flags : fpu amx_bf16 amx_tile", {"float16"}),
        ("flags : fpu avx512_fp16", {"bfloat16"}),
        ("Features : fp asimd fphp asimdhp", {"bfloat16"}),
        ("Features : fp asimd asimdhp bf16", set()),
        (None, set()),  # Nobody knows, as on a Mac.
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_half_precision_is_warned_of_where_a_cpu_is_known_to_lack_it(
    monkeypatch, caplog, tmp_path, flags, slow, device
):
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    monkeypatch.setattr(host, "CPU_INFO", tmp_path / "cpuinfo")
    for precision in ("float32", "bfloat16", "float16"):
        caplog.clear()
        host.warn_of_slow("train.precision", precision, torch.device(device))
        expected = device == "cpu" and precision in slow
        assert [record.levelname for record in caplog.records] == ["WARNING"] * expected
        assert ("about 20 times slower" in caplog.text and "train.precision=float32" in caplog.text) == expected


@pytest.mark.slow
def test_the_doctor_finds_this_machine_well_and_leaves_nothing_behind(clone: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nmt", "doctor", "--json"],
        cwd=clone,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    facts = json.loads(done.stdout)
    assert list(facts["proofs"]) == PROOFS
    assert {proof["outcome"] for proof in facts["proofs"].values()} == {"passed"}
    assert (facts["recipe"], facts["corpus"], facts["direction"]) == ("demo", "mini", "en-zh")
    assert facts["versions"]["torch"] == torch.__version__
    assert list(tmp_path.iterdir()) == []
    # The data is made as by any command, and remembered.
    assert [path.name for path in clone.iterdir()] == ["data"]
    assert {path.name.split("-")[0] for path in (clone / "data/mini").iterdir()} == {"raw", "clean", "bpe", "encode"}
    assert {path.name for path in (clone / "data").iterdir()} == {"mini", ".hashes.json"}
