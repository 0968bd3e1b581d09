"""Mutation testing: does a test fail when one expression or statement of a module is made wrong?

    python scripts/mutation.py                        # every module of TESTS, 150 mutants of each at most
    python scripts/mutation.py loss batching --all    # all mutants of these
    python scripts/mutation.py search --only 12 90    # these again, by number, after a test was added

Each mutant runs the tests of its module in a fork of a process that has imported torch, against a copy of the package
that stands first on PYTHONPATH, so that subprocesses see it too. One runs at a time. A mutant that no test fails on is
printed as a diff: it needs a test, or is equivalent to the original (docs/experiments.md lists those).
"""

import argparse
import ast
import compileall
import gc
import importlib
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import unified_diff
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    "loss": ["test_loss"],
    "optimizer": ["test_optimizer"],
    "batching": ["test_batching"],
    "search": ["test_search"],
    "dataset": ["test_dataset"],
    "scoring": ["test_scoring"],
    "step": ["test_step"],
    "validation": ["test_validation"],
    "training": ["test_training_parts"],
}
"""The test files that must find a fault of each module: its own, since those of whole trainings take a minute."""

IMPORTED_ONCE = "pytest hypothesis numpy torch torch._dynamo torch.utils.tensorboard sentencepiece sacrebleu opencc"
MEMORY = 8 * 2**30
"""Bytes that the tests of a mutant may take."""

COMPARED = {"Lt": ["LtE", "GtE"], "LtE": ["Lt", "Gt"], "Gt": ["GtE", "LtE"], "GtE": ["Gt", "Lt"], "Eq": ["NotEq"],
            "NotEq": ["Eq"], "Is": ["IsNot"], "IsNot": ["Is"], "In": ["NotIn"], "NotIn": ["In"]}  # fmt: skip
COMPUTED = {"Add": "Sub", "Sub": "Add", "Mult": "Div", "Div": "Mult", "FloorDiv": "Mult", "Mod": "FloorDiv",
            "Pow": "Mult", "BitAnd": "BitOr", "BitOr": "BitAnd", "LShift": "RShift",
            "RShift": "LShift", "BitXor": "BitAnd", "MatMult": "Add"}  # fmt: skip
OPPOSITE = {"min": "max", "any": "all", "floor": "ceil", "minimum": "maximum", "argmin": "argmax",
            "bisect_left": "bisect_right"}  # fmt: skip
OPPOSITE |= {new: old for old, new in OPPOSITE.items()}
GUARDS = ("strict", "encoding", "device", "non_blocking")
"""Arguments that guard against a bug, as an assertion does, or that matter on another machine or a GPU alone."""


class Mutant(NamedTuple):
    """A module with one change, and the change as a diff."""

    number: int
    """From 1, in the order of the lines."""
    line: int
    source: str
    diff: str


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    match node:
        case ast.Compare(left, ops, rights):
            for i, op in enumerate(ops):
                for name in COMPARED[type(op).__name__]:
                    yield ast.Compare(left, [*ops[:i], getattr(ast, name)(), *ops[i + 1 :]], rights)
        case ast.BinOp(left, op, right):
            yield ast.BinOp(left, getattr(ast, COMPUTED[type(op).__name__])(), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
            for i in range(len(values)):
                rest = values[:i] + values[i + 1 :]
                yield ast.BoolOp(op, rest) if len(rest) > 1 else rest[0]
        case ast.UnaryOp(_, operand):
            yield operand
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(str() as value):
            yield ast.Constant(f"{value}x")
        case ast.Call(function, args, keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg not in GUARDS:
                    yield ast.Call(function, args, keywords[:i] + keywords[i + 1 :])
            if len(args) > 1 and ast.unparse(function).split(".")[-1] not in OPPOSITE:  # min(a, b) is min(b, a)
                yield ast.Call(function, [args[1], args[0], *args[2:]], keywords)
        case ast.Name(name) if name in OPPOSITE:
            yield ast.Name(OPPOSITE[name])
        case ast.Attribute(value, name) if name in OPPOSITE:
            yield ast.Attribute(value, OPPOSITE[name])
        case ast.Slice(lower, upper, step):
            yield from (ast.Slice(None, upper, step), ast.Slice(lower, None, step))
        case ast.comprehension(target, iterable, ifs) if ifs:
            yield ast.comprehension(target, iterable, [], 0)
        case ast.AugAssign(target, op, value):
            yield from (ast.Pass(), ast.AugAssign(target, getattr(ast, COMPUTED[type(op).__name__])(), value))
        case ast.Assign([target], value):
            # Without its first value a name would not exist, which any test finds.
            known = {name.id for name in ast.walk(value) if isinstance(name, ast.Name)}
            if not isinstance(target, ast.Name | ast.Tuple) or getattr(target, "id", None) in known:
                yield ast.Pass()
        case ast.Return(value) if value is not None:
            yield ast.Return(ast.Constant(None))
        case ast.Continue() | ast.Break():
            yield from (ast.Pass(), ast.Break())
        case ast.Expr() | ast.Raise() | ast.Delete():
            yield ast.Pass()


def places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """(parent, field, index, child) of all that is worth a change: no docstring, annotation, message or assertion."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, ast.Assert | ast.JoinedStr | ast.ImportFrom):
                continue
            if isinstance(child, ast.keyword) and child.arg in GUARDS:
                continue
            if isinstance(child, ast.Subscript) and ast.unparse(child.value) == "Literal":
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            yield node, field, i if isinstance(value, list) else None, child
            if not isinstance(child, ast.Raise):
                yield from places(child)


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(source)
    original, found = ast.unparse(tree), dict[str, int]()
    for parent, field, i, child in list(places(tree)):
        asked = field in ("test", "ifs") and not isinstance(child, ast.Compare | ast.UnaryOp)
        for new in [*replacements(child), *([ast.UnaryOp(ast.Not(), child)] if asked else [])]:
            kept = getattr(parent, field)
            setattr(parent, field, new if i is None else [*kept[:i], new, *kept[i + 1 :]])
            mutated = ast.unparse(ast.fix_missing_locations(tree))
            setattr(parent, field, kept)
            found.setdefault(mutated, getattr(child, "lineno", getattr(parent, "lineno", 0)))
    found.pop(original, None)
    return [
        Mutant(number, line, mutated, "\n".join(list(unified_diff(original.split("\n"), mutated.split("\n"), n=0))[3:]))
        for number, (mutated, line) in enumerate(sorted(found.items(), key=lambda one: one[1]), 1)
    ]


class Overlay:
    """A copy of a project's source in which one module changes, and the tests of that module."""

    def __init__(self, root: Path, module: Path, tests: Sequence[Path], folder: Path) -> None:
        """`module` is relative to `root`/src; `folder` is empty, and the copy is made there."""
        self.module, self.tests, self.source = module, tests, folder / "src"
        for path in root.iterdir():
            if path.name != "src":
                (folder / path.name).symlink_to(path)
        shutil.copytree(root / "src", self.source, ignore=shutil.ignore_patterns("__pycache__"))
        (self.source / module).unlink()
        compileall.compile_dir(self.source, quiet=1)

    def passes(self, source: str, cpu: int, seconds: float) -> bool:
        """Whether the tests pass where the module has this source, in so many CPU seconds and seconds at most."""
        path = self.source / self.module
        path.write_text(source, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()  # of the mutant before this one, which may have the same size and second
        child = os.fork()
        if not child:
            try:
                os.setpgid(0, 0)
                for kind, most in ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_DATA, MEMORY)):
                    resource.setrlimit(kind, (most, most))
                os._exit(self._test())
            finally:
                os._exit(1)
        end, ended, status = time.monotonic() + seconds, 0, 1
        while not ended and time.monotonic() < end:
            time.sleep(0.02)
            ended, status = os.waitpid(child, os.WNOHANG)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what it started
        if not ended:
            os.waitpid(child, 0)
        return bool(ended) and status == 0

    def _test(self) -> int:
        import hypothesis
        import pytest

        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - a test of this script has others
        sys.path.insert(0, str(self.source))
        os.environ |= {"PYTHONPATH": str(self.source), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        # The same examples for every mutant, and no time spent on simpler ones.
        phases, checks = (hypothesis.Phase.explicit, hypothesis.Phase.generate), list(hypothesis.HealthCheck)
        hypothesis.settings.register_profile(
            "mutation", database=None, deadline=None, derandomize=True, phases=phases, suppress_health_check=checks
        )
        # unraisableexception collects all garbage at each end, which is most of the time of a small test file.
        options = "-x -q --tb=no -p no:cacheprovider -p no:unraisableexception -p _hypothesis_pytestplugin"
        options += " --hypothesis-profile=mutation"
        code = pytest.main([*options.split(), "-m", "not slow", *map(str, self.tests)])
        tested = sys.modules[".".join(self.module.with_suffix("").parts)].__file__
        return int(code) if tested == str(self.source / self.module) else 99


def tried(root: Path, module: Path, tests: Sequence[Path], some: Sequence[Mutant]) -> Iterator[tuple[Mutant, bool]]:
    """Each of some mutants, and whether it passes the tests in three times the CPU seconds of the module as it is."""
    source = (root / "src" / module).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        overlay, before, begin = Overlay(root, module, tests, Path(folder)), _cpu_of_children(), time.monotonic()
        if not overlay.passes(source, 600, 3600):
            sys.exit(f"{module}: its tests fail without any change")
        limits = 2 + math.ceil(3 * (_cpu_of_children() - before)), 60 + 20 * (time.monotonic() - begin)
        yield from ((mutant, overlay.passes(mutant.source, *limits)) for mutant in some)


def _cpu_of_children() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(TESTS)}; all if none is named")
    parser.add_argument("--sample", type=int, default=150, metavar="N", help="mutants of each module at most (150)")
    parser.add_argument("--all", action="store_true", help="all mutants")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="these mutants alone")
    given = parser.parse_args(words)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for name in IMPORTED_ONCE.split():
        importlib.import_module(name)
    gc.freeze()
    for name in given.modules or TESTS:
        path, tests = Path("nmt") / f"{name}.py", [ROOT / "tests" / f"{test}.py" for test in TESTS[name]]
        some = mutants((ROOT / "src" / path).read_text(encoding="utf-8"))
        total = len(some)
        if given.only:
            some = [mutant for mutant in some if mutant.number in given.only]
        elif not given.all:
            # In the order of the draw: a run that is broken off has tried a smaller sample.
            some = random.Random(given.seed).sample(some, min(given.sample, len(some)))
        counts = [0, 0]
        try:
            for mutant, survives in tried(ROOT, path, tests, some):
                counts[survives] += 1
                if survives:
                    print(f"{name} {mutant.number}, line {mutant.line}\n{mutant.diff}", flush=True)
        finally:
            print(f"{name}: {counts[0]} of {sum(counts)} killed, of {total} mutants", flush=True)


if __name__ == "__main__":
    main()
