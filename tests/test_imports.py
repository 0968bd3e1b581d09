"""The map of the packages: who imports whom. Imports go down this list only."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nmt import config

SOURCE = Path(__file__).parent.parent / "src" / "nmt"

GROUND = {"config", "languages", "io", "charset", "errors", "special_tokens"}
"""What every package above may import."""
MAP = {
    "__main__": {"cli"},
    "cli": {"diagnostics", "pipeline", "training", "decoding", "runs", "corpus", "distributed", "evaluation", "data"},
    "diagnostics": {"decoding", "runs", "distributed", "data"},  # It trains and translates as its user would.
    "__init__": {"pipeline", "decoding"},
    "pipeline": {"training", "decoding", "runs", "corpus", "distributed", "evaluation", "data"},
    "training": {"decoding", "runs", "corpus", "distributed", "evaluation", "model", "data"},
    "decoding": {"runs", "corpus", "distributed", "evaluation", "model", "data"},
    "runs": {"corpus", "model"},  # A run knows which sentences it was trained on, and how large its model is.
    "corpus": {"distributed", "evaluation"},  # clean tells what BLEU a perfect translation has in another script.
    "distributed": set(),
    "evaluation": set(),
    "model": set(),
    "data": set(),
    # ── ground ──
    "config": set(),
    "languages": set(),
    "io": set(),
    "charset": set(),
    "errors": set(),
    "special_tokens": set(),
}

DOORS = {
    "sentencepiece": "data",
    "sacrebleu": "evaluation/metrics",
    "torch.distributed": "distributed/world",
    "torch.utils.tensorboard": "training/metrics_logger",
    "tensorboard": "training/metrics_logger",
    "opencc": "corpus",
    "safetensors": "runs/checkpoint",
    "typer": "cli",
    "yaml": "config",
}
"""Each outside library is imported in one file or package, so that a change of library is a change of one place."""


def modules() -> Iterator[tuple[str, Path]]:
    """Every source file with the name of its package, or its own if it is in none."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).parts[0].removesuffix(".py"), path


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


def test_the_map_names_every_package() -> None:
    assert {package for package, _ in modules()} == MAP.keys()
    assert len(MAP) <= 20


@pytest.mark.parametrize(("package", "path"), list(modules()), ids=lambda value: getattr(value, "stem", value))
def test_imports_go_down_the_map(package: str, path: Path) -> None:
    used = {name.split(".")[1] for name in imported(path) if name.startswith("nmt.")}
    order = list(MAP)
    allowed = MAP[package] | {package} | {ground for ground in GROUND if order.index(ground) > order.index(package)}
    assert used <= allowed, f"{path.name} imports {sorted(used - allowed)}"


def test_the_map_itself_goes_down() -> None:
    order = list(MAP)
    upward = {
        (package, other) for package, others in MAP.items() for other in others
        if order.index(other) < order.index(package)
    }  # fmt: skip
    assert not upward


def test_the_map_allows_nothing_that_is_not_used() -> None:
    used = {package: set[str]() for package in MAP}
    for package, path in modules():
        used[package] |= {name.split(".")[1] for name in imported(path) if name.startswith("nmt.")}
    assert {package: others - used[package] for package, others in MAP.items() if others - used[package]} == {}


@pytest.mark.parametrize(("library", "door"), DOORS.items())
def test_each_library_has_one_door(library: str, door: str) -> None:
    users = {
        path.relative_to(SOURCE).with_suffix("").as_posix()
        for _, path in modules()
        if any(f"{name}.".startswith(library + ".") for name in imported(path))
    }
    assert {user for user in users if user != door and not user.startswith(f"{door}/")} == set()


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


class SettingsRead(ast.NodeVisitor):
    """Which settings a file reads, as section.name: it follows `config.train` and names that stand for a section.

    A name stands for a section by its annotation (`settings: EvalConfig`) or by what is assigned to it
    (`optim = config.optim`), in the function where that is said and in those inside it.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.scopes: list[dict[str, set[str]]] = [{}]

    def sections(self, node: ast.AST) -> set[str]:
        """The sections that an expression may stand for."""
        match node:
            case ast.Attribute(_, name) if name in config.SECTIONS:
                return {name}
            case ast.Name() | ast.Attribute():
                name = ast.unparse(node)
                return next((scope[name] for scope in reversed(self.scopes) if name in scope), set())
            case ast.IfExp(_, body, orelse):
                return self.sections(body) | self.sections(orelse)
            case ast.BoolOp(_, values):
                return set().union(*map(self.sections, values))
            case ast.Call(ast.Name("replace"), [first, *_]):
                return self.sections(first)
        return set()

    def annotated(self, name: str, annotation: ast.AST | None) -> None:
        written = re.findall(r"\w+", ast.unparse(annotation)) if annotation else []
        self.scopes[-1][name] = {section for section, kind in config.SECTIONS.items() if kind.__name__ in written}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.scopes.append({})
        for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self.annotated(arg.arg, arg.annotation)
        self.generic_visit(node)
        # What a method keeps in self belongs to the class, which is the scope around it.
        ended = self.scopes.pop()
        self.scopes[-1] |= {name: found for name, found in ended.items() if name.startswith("self.")}

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self.annotated(ast.unparse(node.target), node.annotation)
        self.annotated(f"self.{ast.unparse(node.target)}", node.annotation)  # as a field of a class

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            names, values = [target], [node.value]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                names, values = target.elts, node.value.elts
            for name, value in zip(names, values, strict=True):
                self.scopes[-1][ast.unparse(name)] = self.sections(value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.read |= {f"{section}.{node.attr}" for section in self.sections(node.value)}
        self.generic_visit(node)


def settings_read(source: str) -> set[str]:
    visitor = SettingsRead()
    visitor.visit(ast.parse(source))
    return visitor.read


def test_every_setting_is_read_somewhere() -> None:
    sources = [path.read_text(encoding="utf-8") for room, path in modules() if room != "config"]
    read = set().union(*map(settings_read, sources))
    known = {f"{section}.{name}" for section, kind in config.SECTIONS.items() for name in config.sentences(kind)}
    assert known - read == set()


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("config.model.dropout", {"model.dropout"}),
        ("self.config.eval.bootstrap", {"eval.bootstrap"}),
        ("other.dropout; config.dropout; model.dropout()", set()),
        ("def f(s: EvalConfig):\n  return s.dropout", {"eval.dropout"}),
        ("def f(s: 'EvalConfig | None' = None):\n  def g():\n    return s.dropout", {"eval.dropout"}),
        ("def f(s: EvalConfig): pass\ndef g(s): return s.dropout", set()),
        ("def f(s: EvalConfig):\n  s.dropout = 1", set()),
        ("def f(c):\n  a, b = c.model, c.optim\n  return a.dropout, b.eps", {"model.dropout", "optim.eps"}),
        ("def f(c, s: EvalConfig):\n  def g(s: ModelConfig): return s.dropout", {"model.dropout"}),
        ("class A:\n  s: BpeConfig\n  def f(self): return self.s.dropout", {"bpe.dropout"}),
        (
            "class A:\n  def __init__(self, s: BpeConfig): self.s = s\n  def f(self): return self.s.dropout",
            {"bpe.dropout"},
        ),
    ],
)
def test_a_setting_counts_as_read_in_its_own_section_only(source: str, read: set[str]) -> None:
    assert settings_read(source) == read


def test_no_source_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for _, path in modules()}
    assert {name: n for name, n in lengths.items() if n > 400 and name != "schema.py"} == {}
