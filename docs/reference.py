"""The reference pages of the site, made from the code at each build: settings, commands, the Python interface.

A page names a function of this module in a line `<!-- generated: NAME -->`, which the build replaces by what the
function returns. Nothing of it is committed, so it cannot be out of date.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import typer
import yaml

from nmt import config as schema

WIDTH = 88
"""Columns of a line of code on a page."""

MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.M)


def settings() -> str:
    """Each section with a table of its settings."""
    parts = []
    for name, section in schema.SECTIONS.items():
        kinds, sentences = schema.kinds(section), schema.sentences(section)
        defaults = schema.to_dict(section())
        rows = [
            (f"`{name}.{key}`", f"`{_type(section, key)}`", f"`{_plain(value)}`", kinds[key], _escape(sentences[key]))
            for key, value in defaults.items()
        ]
        doc = inspect.getdoc(section) or ""
        parts.append(f"## {name}\n\n{doc}\n\n" + _table(("setting", "type", "default", "kind", "what it is"), rows))
    return "\n\n".join(parts)


def commands() -> str:
    """The help of each command, as it prints it."""
    from nmt.cli import app

    parts = []
    for words, command in _commands(typer.main.get_command(app), ["nmt"]):
        with command.make_context(" ".join(words), [], resilient_parsing=True, terminal_width=WIDTH) as context:
            text = command.get_help(context)
        parts.append(f"## {' '.join(words)}\n\n```text\n{text}\n```")
    return "\n\n".join(parts)


def python() -> str:
    """What `import nmt` offers: signatures and docstrings."""
    import nmt

    parts = []
    for name in nmt.__all__:
        thing = getattr(nmt, name)
        parts.append(f"## nmt.{name}\n\n{_described(name, thing)}")
        if inspect.isclass(thing):
            for method, function in inspect.getmembers(thing, lambda member: callable(member)):
                if not method.startswith("_"):
                    parts.append(f"### {name}.{method}\n\n{_described(method, function)}")
    return "\n\n".join(parts)


GENERATORS: dict[str, Callable[[], str]] = {made.__name__: made for made in (settings, commands, python)}


def fill(text: str) -> str:
    """A page with what its marks stand for."""
    return MARK.sub(lambda mark: GENERATORS[mark[1]](), text)


def _commands(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from _commands(below, [*words, name])


def _type(section: type[Any], key: str) -> str:
    found = {field.name: field.type for field in dataclasses.fields(section)}[key]
    text = found.__name__ if isinstance(found, type) else str(found)
    # The kind has a column of its own, and a choice reads as in the help of a command.
    text = re.sub(r"typing\.|\w+\.(?=\w)", "", text)
    text = re.sub(r"^Annotated\[(.*), '\w+'\]$", r"\1", text)
    return re.sub(r"Literal\[([^]]*)\]", lambda choice: choice[1].replace("'", "").replace(", ", " | "), text)


def _plain(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def _escape(text: str) -> str:
    """Markdown that shows this text as it is in a cell of a table."""
    outside = r"([|*_<$^])"
    return "".join(
        part.replace("|", r"\|") if number % 2 else re.sub(outside, r"\\\1", part)
        for number, part in enumerate(re.split(r"(`[^`]*`)", text))
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *(tuple(cell.replace(" | ", r" \| ") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _described(name: str, thing: Any) -> str:
    """Signature and docstring; of a class the docstring alone."""
    doc = inspect.getdoc(thing) or ""
    if inspect.isclass(thing):
        return doc
    signature = inspect.signature(thing)
    # Names without their modules, forward references without quotes, and no address of a default that is a function.
    text = re.sub(r" = <.*?>+(?=[,)])", " = ...", str(signature))
    text = re.sub(r"(: |-> )'([^']+)'", r"\1\2", re.sub(r"\b(?:\w+\.)+(?=\w)", "", text))
    inside, _, result = text.removeprefix("(").rpartition(")")
    line = f"{name}({inside}){result}"
    if len(line) > WIDTH:
        inside = "".join(f"    {part},\n" for part in re.split(r", (?=\w+:|\*)", inside))
        line = f"{name}(\n{inside}){result}"
    return f"```python\n{line}\n```\n\n{doc}"


# ── places in the code ──────────────────────────────────────────────────────────────────────────────────────────────


class Place(NamedTuple):
    """Where something stands in the source."""

    module: str
    line: int
    source: str
    """All lines of it."""

    def line_of(self, quoted: str) -> int | None:
        """The line on which a quoted line stands, whatever its indentation; None where it doesn't."""
        for number, line in enumerate(self.source.split("\n"), self.line):
            if line.strip() == quoted.strip():
                return number
        return None


def find(name: str) -> Place | None:
    """The place of a dotted name such as `nmt.model.Attention.forward`; None where there is no function or class of it.

    It is found by import, so that it may move inside its module and a page needs no change.
    """
    words = name.split(".")
    for count in range(len(words), 0, -1):
        try:
            module = importlib.import_module(".".join(words[:count]))
        except ImportError:
            continue
        try:
            thing = inspect.unwrap(reduce(getattr, words[count:], module))
            lines, first = inspect.getsourcelines(thing)
        except (AttributeError, TypeError, OSError):
            return None
        return Place(thing.__module__ if count < len(words) else module.__name__, max(first, 1), "".join(lines))
    return None


def source_files(package: Path) -> dict[str, Path]:
    """The modules of the package by their dotted names."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        words = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return found
