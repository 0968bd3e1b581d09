"""Options that several commands share, and printing of results."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from nmt import config as settings
from nmt.errors import ConfigError

ConfigFile = Annotated[
    str | None,
    typer.Option("-c", "--config", metavar="FILE", help="Settings file: a path, in configs/, or a bundled recipe."),
]
Recipe = Annotated[
    str | None,
    typer.Option(
        "-c", "--config", metavar="FILE", help="Settings file (required): a path, in configs/, or a bundled recipe."
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one setting; repeatable."),
]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1 or mps.")]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of the run; default: RECIPE.SRC-TGT.")]
RunFolder = Annotated[
    Path | None,
    typer.Option("--run", metavar="FOLDER", help="Run folder; default: the newest finished run."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Processes = Annotated[
    int,
    typer.Option(
        "--processes",
        metavar="N",
        min=0,
        help="Training processes on this machine; 0: one per core on a CPU, one on a GPU.",
    ),
]


def load(recipe: str | None, changes: Iterable[str] | None) -> settings.Config:
    """Load the settings of a command that requires a recipe."""
    if recipe is None:
        raise ConfigError(
            f"which recipe? Give it with -c FILE: one of {', '.join(settings.recipes())}, or a file of yours. "
            "`nmt run -c demo` shows the whole in minutes; `nmt plan -c FILE` says what a training will cost."
        )
    return settings.load(recipe, list(changes or ()))


def print_result(facts: Any, lines: Iterable[str], as_json: bool) -> None:
    """Print a result to stdout, as JSON or as lines."""
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=1))
    else:
        for line in lines:
            typer.echo(line)


def table(facts: dict[str, Any], indent: str = "") -> list[str]:
    """Format nested values as aligned lines, names on the left."""
    width = max((len(name) for name, value in facts.items() if not isinstance(value, dict)), default=0)
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", *table(value, indent + "  ")]
        else:
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
            lines.append(f"{indent}{name:<{width}}  {shown}")
    return lines
