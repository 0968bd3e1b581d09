"""The map of the house: who imports whom. Imports go down this list only."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nmt import config

SOURCE = Path(__file__).parent.parent / "src" / "nmt"

GROUND = {"config", "languages", "text", "charset", "errors", "symbols"}
MAP = {
    "__init__": {"translation"},
    "__main__": {"cli"},
    "cli": {"pipeline", "stages", "runs", "plan", "provenance", "checkpoint", "corpus", "tokenizer", "dataset",
            "distributed", "launch", "averaging",
            "translate_files", "translation", "scoring", "evaluation", "doctor", "rehearsal", "machine"},
    "doctor": {"rehearsal", "pipeline", "translation", "tokenizer", "provenance", "checkpoint", "machine",
               "distributed"},
    "rehearsal": {"checkpoint", "launch"},
    "stages": {"pipeline", "runs", "provenance", "corpus", "tokenizer", "dataset", "training", "distributed",
               "translate_files", "translation", "evaluation"},
    "runs": {"pipeline", "provenance", "sizes"},
    "plan": {"pipeline", "batching", "dataset", "distributed", "step", "loss", "sizes", "tracking"},
    # ── the street ──
    "training": {"validation", "watch", "launch", "step", "dataset", "batching", "checkpoint", "tracking",
                 "distributed", "provenance", "tokenizer", "corpus", "sizes", "overlap"},
    "averaging": {"validation", "step", "checkpoint", "tokenizer", "distributed", "provenance"},
    "validation": {"step", "dataset", "checkpoint", "tracking", "translation", "scoring", "tokenizer", "corpus",
                   "distributed", "provenance"},
    "watch": {"step", "batching", "distributed"},
    "step": {"batching", "dataset", "distributed", "loss", "model", "optimizer", "sizes"},
    "evaluation": {"scoring", "overlap"},
    "translate_files": {"translation"},
    "translation": {"sentences", "outputs", "tokenizer", "batching", "search", "model", "checkpoint", "provenance",
                    "corpus", "distributed", "workers"},
    "dataset": {"tokenizer", "batching"},
    "tokenizer": set(),
    # ── parts ──
    "workers": {"distributed", "launch"},
    "sentences": set(),
    "provenance": {"pipeline", "overlap"},
    "overlap": {"corpus"},
    "corpus": {"scoring", "launch"},  # clean says what BLEU a perfect translation has on a given set in another script.
    "scoring": {"outputs", "resampling"},
    "outputs": set(),
    "resampling": set(),
    "pipeline": set(),
    "checkpoint": {"model"},
    "model": set(),
    "search": set(),
    "batching": set(),
    "loss": set(),
    "optimizer": set(),
    "sizes": set(),
    "machine": {"launch"},
    "tracking": set(),
    "distributed": set(),
    "launch": set(),
    # ── ground ──
    "config": set(),
    "languages": set(),
    "text": set(),
    "charset": set(),
    "errors": set(),
    "symbols": set(),
}  # fmt: skip

DOORS = {
    "sentencepiece": "tokenizer",
    "sacrebleu": "scoring",
    "torch.distributed": "distributed",
    "torch.utils.tensorboard": "tracking",
    "tensorboard": "tracking",
    "opencc": "corpus",
    "safetensors": "checkpoint",
    "typer": "cli",
    "yaml": "config",
}
"""Each outside library has one door, so that a change of library is a change of one place."""


def modules() -> Iterator[tuple[str, Path]]:
    """Every source file with the name of the room that it is in: that of its package, if it is in one."""
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        yield room, path


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, inside functions too; not those that only a type checker sees."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_the_map_names_every_module() -> None:
    assert {room for room, _ in modules()} == MAP.keys()


@pytest.mark.parametrize(("room", "path"), list(modules()), ids=lambda value: getattr(value, "stem", value))
def test_imports_go_down_the_map(room: str, path: Path) -> None:
    used = {name.split(".")[1] for name in imported(path) if name.startswith("nmt.")}
    order = list(MAP)
    allowed = MAP[room] | {room} | {ground for ground in GROUND if order.index(ground) > order.index(room)}
    assert used <= allowed, f"{path.name} imports {sorted(used - allowed)}"


def test_the_map_itself_goes_down() -> None:
    order = list(MAP)
    upward = {
        (room, other) for room, others in MAP.items() for other in others if order.index(other) < order.index(room)
    }
    assert not upward


@pytest.mark.parametrize(("library", "door"), DOORS.items())
def test_each_library_has_one_door(library: str, door: str) -> None:
    users = {room for room, path in modules() if any(f"{name}.".startswith(library + ".") for name in imported(path))}
    assert users <= {door}


def test_the_command_line_loads_no_torch() -> None:
    heavy = {"torch", "sacrebleu", "sentencepiece", "opencc", "tensorboard", "numpy"}
    code = f"import sys, nmt.cli; print(*({heavy!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_nothing_that_could_run_foreign_code_is_read() -> None:
    forbidden = ("pickle", "torch.load", "torch.jit.load", "yaml.load(", "yaml.unsafe", "eval(", "exec(", "shell=True")
    for _, path in modules():
        text = path.read_text(encoding="utf-8").replace(".eval(", "")
        assert not [word for word in forbidden if word in text and f"def {word}" not in text], path


@pytest.mark.parametrize("section", config.SECTIONS)
def test_every_setting_is_read_somewhere(section: str) -> None:
    read = {
        node.attr
        for _, path in modules()
        if path.name != "config.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    unread = {name for name in config.sentences(config.SECTIONS[section]) if name not in read}
    assert not unread


def test_no_source_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for _, path in modules()}
    assert {name: n for name, n in lengths.items() if n > 450 and name != "config.py"} == {}
