"""Mutation testing, on a small module with two mutants that no test can find."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"

MODULE = '''
def largest(numbers: list[int]) -> int:
    """This is no place for a mutant, and neither is the annotation."""
    found = numbers[0]  # any of them would do
    for number in numbers:
        if number > found:
            found = number
    return found


def twice(number):
    return number + number


def countdown(number):
    while number:
        number -= 1
'''

TESTS = """
import subprocess, sys
from toy.parts import countdown, largest

def test_largest_and_that_there_is_an_end():
    assert [largest(numbers) for numbers in ([1, 3, 2], [4], [-1, -2])] == [3, 4, -1]
    countdown(3)

def test_twice_in_another_process():
    code = "from toy.parts import twice; print(twice(4))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "8\\n"
"""


@pytest.fixture(scope="module")
def mutation():
    """The module scripts/mutation.py."""
    sys.path.insert(0, str(SCRIPTS))
    import mutation

    yield mutation
    sys.path.remove(str(SCRIPTS))


def test_the_mutants_that_tests_cannot_find_are_those_that_change_nothing(mutation, tmp_path):
    for path, text in {"src/toy/__init__.py": "", "src/toy/parts.py": MODULE, "tests/test_parts.py": TESTS}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    mutants = mutation.mutants(MODULE)
    hang = [mutant for mutant in mutants if "+        pass" in mutant.diff]
    assert len(hang) == 1
    mutants = [mutant for mutant in mutants if mutant.line < 14] + hang  # which takes seconds
    found = mutation.tried(tmp_path, Path("toy/parts.py"), [tmp_path / "tests/test_parts.py"], mutants)
    assert [mutant.diff.replace("    ", "") for mutant, survives in found if survives] == [
        "-found = numbers[0]\n+found = numbers[-1]",
        "-if number > found:\n+if number >= found:",
    ]
    assert (tmp_path / "src/toy/parts.py").read_text() == MODULE


def test_each_mutant_is_another_program_and_changes_no_docstring_annotation_or_message(mutation):
    source = 'def f(a: int = 1) -> "x":\n    """Say."""\n    assert a, "b"\n    raise ValueError("c", a + 1)\n'
    assert [mutant.diff.split("\n+")[1].strip() for mutant in mutation.mutants(source)] == [
        *("def f(a: int=2) -> 'x':", "def f(a: int=0) -> 'x':", "pass")
    ]
