"""A street of three small stages over text files stands for the real one."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nmt.errors import ConfigError, DataError
from nmt.pipeline import engine
from nmt.pipeline.engine import Stage, cached_hashes, make_stage, run, status


class Street:
    """upper: raw.txt in capitals; count: its letters; report: both in one run folder. Remembers who acted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.acted: list[str] = []
        self.upper_settings: dict[str, object] = {"upper": {"mark": "!"}}
        self.count_settings: dict[str, object] = {"count": {"unit": "letters"}}
        self.format = 1
        (folder / "raw.txt").write_text("hello\n")

    def __call__(self) -> list[Stage]:
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        with cached_hashes(data / ".hashes.json") as content_hash:

            def make(
                name: str, home: Path, reads: dict[str, Path], settings: dict[str, object], result: str = ""
            ) -> Stage:
                return make_stage(
                    name,
                    reads=reads,
                    settings=settings,
                    writes=home,
                    action=self.action(name, list(reads.values())),
                    content_hash=content_hash,
                    result=result,
                    format=self.format,
                    packages=("sacrebleu",),
                    numbered=not result,
                )

            upper = make("upper", data / "upper", {"raw": self.folder / "raw.txt"}, self.upper_settings)
            count = make("count", data / "count", {"upper/text": upper.writes / "text"}, self.count_settings)
            report = make("report", self.folder / "run", {"count": count.writes}, {}, result="final")
        return [upper, count, report]

    def action(self, name: str, reads: list[Path]) -> Callable[[Path], None]:
        def act(out: Path) -> None:
            self.acted.append(name)
            text = reads[0].read_text() if reads[0].is_file() else (reads[0] / "text").read_text()
            if name == "upper":
                (out / "text").write_text(text.upper())
            elif name == "count":
                (out / "text").write_text(str(sum(map(str.isalpha, text))))
            else:
                (out / "final").mkdir(exist_ok=True)
                (out / "final" / "text").write_text(text)
                (out / "log").write_text("not part of the result")

        return act

    def words(self) -> list[str]:
        return [state.word for state in status(self())]


@pytest.fixture
def street(tmp_path: Path) -> Street:
    return Street(tmp_path)


def test_a_street_that_was_walked_is_fresh_and_is_not_walked_again(street: Street) -> None:
    assert street.words() == ["missing", "blocked", "blocked"]
    run(street)
    assert street.acted == ["upper", "count", "report"]
    assert street.words() == ["up_to_date", "up_to_date", "up_to_date"]
    run(street)
    assert street.acted == ["upper", "count", "report"]


def test_a_changed_setting_is_named_with_the_old_and_the_new_value(street: Street) -> None:
    run(street)
    street.upper_settings = {"upper": {"mark": "?"}}
    states = status(street())
    assert str(states[0]) == "upper: out of date, upper.mark: ! -> ?"
    assert str(states[1]) == "count: blocked by upper"


def test_a_changed_file_is_named(street: Street) -> None:
    run(street)
    (street.folder / "raw.txt").write_text("other\n")
    assert status(street())[0].reason == "raw has changed"
    (street.folder / "raw.txt").unlink()
    assert status(street())[0].reason == f"{street.folder / 'raw.txt'} is missing"
    with pytest.raises(DataError, match=r"raw\.txt is missing"):
        run(street)


def test_a_change_stops_where_its_output_is_the_same(street: Street) -> None:
    run(street)
    (street.folder / "raw.txt").write_text("HELLO\n")  # Upper case makes the same of it.
    run(street)
    assert street.acted == ["upper", "count", "report", "upper"]


def test_two_settings_have_two_folders_and_going_back_is_fresh(street: Street) -> None:
    run(street)
    street.upper_settings = {"upper": {"mark": "?"}}
    run(street)
    assert len(list((street.folder / "data").glob("upper-*"))) == 2
    street.upper_settings = {"upper": {"mark": "!"}}
    assert street.words() == ["up_to_date", "up_to_date", "up_to_date"]


def test_a_new_format_makes_old_output_stale(street: Street) -> None:
    run(street)
    street.format = 2
    assert "format" in status(street())[0].reason


def test_output_that_was_cut_or_lost_is_made_again(street: Street) -> None:
    run(street)
    text = street()[0].writes / "text"
    text.write_text("HEL")
    assert street.words()[0] == "out_of_date"
    run(street)
    assert text.read_text() == "HELLO\n"
    text.unlink()
    assert street.words()[:2] == ["out_of_date", "blocked"]
    run(street)
    assert street.words() == ["up_to_date", "up_to_date", "up_to_date"]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_output_that_was_changed_to_the_same_size_and_time_is_made_again(street: Street, position: int) -> None:
    run(street)
    stage = street()[position]
    (text,) = (path for path in stage.writes.rglob("text"))
    content, facts = text.read_text(), text.stat()
    text.write_text("9" * len(content))
    os.utime(text, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert str(status(street())[position]) == f"{stage.name}: out of date, {text} is not as it was made"
    run(street)
    assert text.read_text() == content


def test_a_status_says_which_other_version_of_a_package_has_made_what_is_there(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(street)
    assert str(status(street())[0]) == f"upper: up to date ({street()[0].writes})"
    now = engine._versions()
    monkeypatch.setattr(engine, "_versions", lambda: now | {"sacrebleu": "99.1", "torch": "0.1"})
    told = f"made with sacrebleu {now['sacrebleu']}, here is sacrebleu 99.1"
    assert next(map(str, status(street()))) == f"upper: up to date ({street()[0].writes}); {told}"
    monkeypatch.setattr(engine, "_versions", lambda: {})
    assert status(street())[1].reason.endswith("here is sacrebleu not installed")
    assert street.words() == ["up_to_date"] * 3


def test_a_folder_without_its_stamp_was_never_finished(street: Street) -> None:
    run(street)
    (street()[0].writes / "stamp.json").unlink()
    assert street.words()[0] == "missing"
    (street()[0].writes / "stamp.json").write_text("{ half a stam")
    assert street.words()[0] == "missing"
    run(street)
    assert street.words() == ["up_to_date", "up_to_date", "up_to_date"]


def test_a_stage_that_fails_leaves_nothing_under_any_name(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, reads: list[Path]) -> Callable[[Path], None]:
        def act(out: Path) -> None:
            (out / "half").write_text("half")
            raise DataError("broken")

        return act

    monkeypatch.setattr(street, "action", fail)
    with pytest.raises(DataError, match="broken"):
        run(street)
    assert [path.name for path in (street.folder / "data").iterdir() if path.is_dir()] == []


def test_a_stage_with_a_result_goes_on_in_its_own_folder(street: Street) -> None:
    run(street, "count")
    folder = street.folder / "run"
    folder.mkdir()
    (folder / "checkpoint").write_text("step 7")
    assert str(status(street())[2]) == "report: started, not finished"
    run(street)
    assert (folder / "checkpoint").read_text() == "step 7"
    (folder / "checkpoint").unlink()
    assert street.words()[2] == "up_to_date", "only the result counts"
    (folder / "final" / "text").unlink()
    assert street.words()[2] == "out_of_date"


def test_run_stops_after_the_wanted_stage_and_refuses_an_unknown_one(street: Street) -> None:
    run(street, "count")
    assert street.acted == ["upper", "count"]
    with pytest.raises(ConfigError, match="no stage counts; the pipeline has upper, count, report"):
        run(street, "counts")


def test_a_walk_that_begins_later_does_not_make_what_comes_before(street: Street) -> None:
    with pytest.raises(DataError, match="count: blocked by upper"):
        run(street, since="count")
    run(street, "count")
    run(street, since="report")
    assert street.acted == ["upper", "count", "report"]


def test_a_stage_waits_for_the_nearest_stage_that_is_not_fresh(street: Street) -> None:
    run(street)
    (street()[1].writes / "text").write_text("changed by hand")
    assert [str(state).split(" ", 1)[1] for state in status(street())[1:]] == [
        f"out of date, {street()[1].writes / 'text'} is not as it was made",
        "blocked by count",
    ]


def test_the_fingerprint_does_not_depend_on_where_the_files_lie(tmp_path: Path) -> None:
    prints = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        prints.add(Street(tmp_path / name)()[0].fingerprint)
    assert len(prints) == 1


def test_the_fingerprint_tells_every_part_apart(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    (tmp_path / "two").write_text("2")
    facts = {"name": "s", "reads": {"x": tmp_path / "one"}, "settings": {"s": {"k": 1}}, "format": 1}
    others = [{"name": "t"}, {"reads": {"x": tmp_path / "two"}}, {"reads": {"y": tmp_path / "one"}},
              {"settings": {"s": {"k": 2}}}, {"format": 2}]  # fmt: skip
    with cached_hashes(tmp_path / "memory") as content_hash:
        prints = [
            make_stage(
                **(facts | other), writes=tmp_path, action=lambda out: None, content_hash=content_hash
            ).fingerprint  # type: ignore[arg-type]
            for other in [{}, *others]
        ]
    assert len(set(prints)) == len(prints)


def test_a_content_hash_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, memory = tmp_path / "file", tmp_path / "memory"

    def ask() -> str:
        with cached_hashes(memory) as content_hash:
            return content_hash(file)

    file.write_text("one")
    later = time.time_ns() + 10**10  # The time of the last change can't be set, but our clock can.
    monkeypatch.setattr(time, "time_ns", lambda: later)
    long_ago = 1_600_000_000
    os.utime(file, (long_ago, long_ago))
    first = ask()
    opened: list[Path] = []
    real_open = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: (opened.append(self), real_open(self, *a, **k))[1])
    assert ask() == first
    assert file not in opened
    file.write_text("two")  # The same size and, as `touch -r` can do, the same time.
    os.utime(file, (long_ago, long_ago))
    assert ask() != first
    file.write_text("one")
    (tmp_path / "other").write_text("two")
    os.utime(tmp_path / "other", (long_ago, long_ago))
    assert ask() == first
    os.replace(tmp_path / "other", file)
    assert ask() != first
    memory.write_text("[1, 2")
    assert ask() != first


def test_a_file_that_changed_a_moment_ago_is_not_remembered(tmp_path: Path) -> None:
    file, memory = tmp_path / "file", tmp_path / "memory"
    file.write_text("one")
    stat = file.stat()
    with cached_hashes(memory) as content_hash:
        first = content_hash(file)
    file.write_text("two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with cached_hashes(memory) as content_hash:
        assert content_hash(file) != first


def test_what_another_process_made_meanwhile_is_taken(street: Street) -> None:
    built = [street()]
    run(street, "upper")  # Another process, between our look at the street and our first step.
    stages = run(lambda: built.pop() if built else street(), "count")
    assert street.acted == ["upper", "count"]
    assert (stages[1].writes / "text").read_text() == "5"


def test_two_that_walk_at_once_both_end_with_a_whole_street(street: Street) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(4)

    def walk() -> None:
        try:
            barrier.wait()
            run(street, "count")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=walk) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert street.words()[:2] == ["up_to_date", "up_to_date"]
    assert not list((street.folder / "data").glob(".*.part"))
    assert not list((street.folder / "data").glob(".*.old"))


def test_the_stamp_says_what_it_was_made_of(street: Street) -> None:
    run(street)
    stage = street()[0]
    stamp = json.loads((stage.writes / "stamp.json").read_text())
    assert stamp["fingerprint"] == stage.fingerprint
    assert stage.writes.name == f"upper-{stage.fingerprint[:8]}"
    assert stamp["settings"] == street.upper_settings
    assert stamp["wrote"] == {"text": hashlib.sha256(b"HELLO\n").hexdigest()}
    assert {"python", "nmt", "torch"} <= stamp["versions"].keys()


def test_what_a_killed_process_left_is_swept_after_a_day(street: Street) -> None:
    data = street.folder / "data"
    street()
    old, new = data / ".upper-12345678.aaaa.part", data / ".upper-12345678.bbbb.part"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (1_600_000_000, 1_600_000_000))
    run(street)
    assert not old.exists()
    assert new.exists()


def test_asking_how_things_stand_loads_no_torch() -> None:
    code = "import sys, nmt.pipeline.stages, nmt.pipeline.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert engine.STAMP == "stamp.json"
