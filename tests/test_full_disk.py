"""A disk that is full, or a folder that is not ours: told in one line with the path, and nothing half done stays."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forked import nmt

FULL = ("No space left on device", "File too large")
STAGES = ["clean", "bpe", "encode", "train", "translate", "eval"]
RUN = "runs/tiny.en-zh"


def files(folder: Path) -> dict[str, str]:
    """The hash of every file."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def without(walked: Path, folder: Path, stage: str) -> Path:
    """A copy of a walked street in which `stage` and what follows it were never done."""
    shutil.copytree(walked, folder, dirs_exist_ok=True)
    for name in STAGES[STAGES.index(stage) :]:
        where = {"train": ".", "translate": "translate", "eval": "eval"}.get(name)
        for path in [folder / RUN / where] if where else (folder / "data/mini").glob(f"{name}-*"):
            shutil.rmtree(path, ignore_errors=True)
    (folder / "data/.hashes.json").unlink(missing_ok=True)
    return folder


def check_refusal(folder: Path, stage: str, before: dict[str, str], ended) -> None:
    """The disk was told of in one line, and nothing that was there before has changed."""
    where = RUN if stage in STAGES[3:] else "data/mini/"
    assert ended.code == 1, ended.told
    assert "Traceback" not in ended.told
    (said,) = [line for line in ended.told.split("\n") if any(text in line for text in FULL)]
    assert where in said
    assert "bytes are free" in said
    after = files(folder)
    assert {name: after.get(name) for name in before} == before
    assert [name for name in after if ".part" in name and stage != "train"] == []
    if stage != "train":
        here = folder / "data/mini" if stage in STAGES[:3] else folder / RUN
        assert [path.name for path in here.glob(f"{stage}*")] == []
    if stage == "train":
        assert not (folder / RUN / "final").exists()
        for kept in (folder / RUN).glob("checkpoints/*"):
            assert (kept / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "largest"),
    [
        *(("clean", size) for size in (0, 100, 5_000, 40_000)),
        *(("bpe", size) for size in (0, 100, 15_000)),
        *(("encode", size) for size in (0, 100, 1_000, 20_000)),
        *(("train", size) for size in (60_000, 200_000)),
        *(("translate", size) for size in (0, 100)),
        *(("eval", size) for size in (0, 100)),
    ],
)
def test_a_file_that_cannot_grow_ends_the_stage_in_one_line_and_leaves_the_rest_alone(
    pipeline_run, tmp_path, stage, largest
):
    folder = without(pipeline_run, tmp_path / "street", stage)
    before = files(folder)
    ended = nmt(folder, "run", "-c", "tiny.yaml", "--upto", stage, largest_file=largest)
    check_refusal(folder, stage, before, ended)
    if largest in (100, 60_000):
        assert nmt(folder, "run", "-c", "tiny.yaml", "--upto", stage).code == 0


@pytest.mark.slow
def test_a_training_whose_disk_fills_keeps_its_old_checkpoints_and_goes_on_later(pipeline_run, tmp_path):
    folder = tmp_path / "street"
    shutil.copytree(pipeline_run, folder)
    kept = files(folder / RUN / "checkpoints") | files(folder / RUN / "final")
    more = ("train", "-c", "tiny.yaml", "--set", "train.max_steps=12")
    ended = nmt(folder, *more, largest_file=200_000)
    assert ended.code == 1, ended.told
    assert "Traceback" not in ended.told
    assert any(text in ended.told for text in FULL)
    assert "bytes are free" in ended.told
    assert files(folder / RUN / "checkpoints") | files(folder / RUN / "final") == kept
    assert nmt(folder, *more).code == 0


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk whose size can be set with `resize`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = os.getuid() == 0 and shutil.which("mount")
    if not made or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]).returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield folder
    subprocess.run(["umount", folder], check=True)


def resize(disk: Path, room: int) -> None:
    """Leave so many bytes free, but for the rest of a page."""
    usage = shutil.disk_usage(disk)
    size = usage.used + room
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


def needed_on(disk: Path, folder: Path) -> int:
    """Bytes that are taken, but for the memory of content hashes, which may find no room without a word."""
    memory, page = folder / "data/.hashes.json", os.sysconf("SC_PAGE_SIZE")
    size = memory.stat().st_size if memory.exists() else 0
    return shutil.disk_usage(disk).used - -(-size // page) * page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "shares"),
    # The last two write a page or two; of what is needed the hashes that are remembered may be left out.
    [("clean", 5), ("bpe", 4), ("encode", 4), ("train", 4), ("translate", 1), ("eval", 1)],
)
def test_a_disk_that_fills_at_any_point_of_a_stage_is_told_in_one_line(pipeline_run, small_disk, stage, shares):
    folder = without(pipeline_run, small_disk / "street", stage)
    before = files(folder)
    used = needed_on(small_disk, folder)
    assert nmt(folder, "run", "-c", "tiny.yaml", "--upto", stage).code == 0
    needed = needed_on(small_disk, folder) - used
    for share in range(shares):
        subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
        shutil.rmtree(folder)
        without(pipeline_run, folder, stage)
        # A training that has no room for its settings has not begun; that is told as a matter of settings.
        resize(small_disk, max(needed * share // shares, 200_000 if stage == "train" else 0) + 4096)
        ended = nmt(folder, "run", "-c", "tiny.yaml", "--upto", stage)
        check_refusal(folder, stage, before, ended)
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    assert nmt(folder, "run", "-c", "tiny.yaml", "--upto", stage).code == 0


@pytest.mark.slow
def test_translations_that_find_no_room_leave_no_file_and_an_earlier_one_as_it_was(pipeline_run, tmp_path):
    (tmp_path / "in.txt").write_text("The cat is here.\n" * 40)
    words = ("translate", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.txt"), "--force")
    for earlier in (None, "mine"):
        if earlier:
            (tmp_path / "out.txt").write_text(earlier)
        before = files(tmp_path)
        ended = nmt(pipeline_run, *words, largest_file=10)
        assert ended.code == 1
        assert f"{tmp_path / 'out.txt'}: File too large" in ended.told
        assert "bytes are free" in ended.told
        assert "Traceback" not in ended.told
        assert files(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["clean", "-c", "tiny.yaml"], "data/mini"),
        (["bpe", "-c", "tiny.yaml"], "data/mini"),
        (["encode", "-c", "tiny.yaml"], "data/mini"),
        (["train", "-c", "tiny.yaml"], "runs"),
        (["train", "-c", "tiny.yaml", "--set", "train.max_steps=12"], RUN),
        (["run", "-c", "tiny.yaml", "--set", "translate.beam=2"], RUN),
        (["run", "-c", "tiny.yaml", "--set", "eval.bootstrap=2"], RUN),
        (["translate", "tiny.yaml", "-o", "out.txt"], "out.txt"),
        (["average", RUN], RUN),
        (["fetch", "other", "--from", "tiny.yaml"], "data/other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_folder_that_may_not_be_written_is_named_before_work_is_done(pipeline_run, tmp_path, words, where):
    folder = tmp_path / "street"
    if words[0] in STAGES[:3] or words == ["train", "-c", "tiny.yaml"]:
        without(pipeline_run, folder, words[0])
    else:
        shutil.copytree(pipeline_run, folder)
    before = files(folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    ended = nmt(folder, *words, bound_by_modes=True)
    assert ended.code in (1, 2), ended.told
    assert where in ended.told
    assert "Permission denied" in ended.told
    assert "Traceback" not in ended.told
    assert "done in" not in ended.told
    assert files(folder) == before
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
