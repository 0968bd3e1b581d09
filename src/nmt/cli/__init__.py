"""The command line: the commands, in the order of the pipeline, and how errors are reported.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 usage or settings, 130 and 143 on a
signal.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from nmt.cli import pipeline, tools, translate
from nmt.cli.worker import set_up_logging
from nmt.errors import STDOUT, NmtError, describe_error
from nmt.io import installed_version, use_utf8

HELP = {"help_option_names": ["-h", "--help"]}


class Commands(TyperGroup):
    """The commands; a closed pipe (`nmt translate | head`) ends them without an error."""

    def invoke(self, ctx: Any) -> Any:
        try:
            outcome = super().invoke(ctx)
            sys.stdout.flush()
            return outcome
        except BrokenPipeError as error:
            _close_stdout()
            raise typer.Exit(0) from error


app = typer.Typer(
    cls=Commands, no_args_is_help=True, context_settings=HELP, rich_markup_mode=None, pretty_exceptions_enable=False
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nmt {installed_version('nmt') or 'from a source tree'}")
        raise typer.Exit


@app.callback()
def general(
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Show warnings and errors only.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """From a raw parallel corpus to a trained, scored Transformer.

    raw text -> clean -> bpe -> encode -> train -> translate -> eval

    Commands that use a recipe need -c FILE; --set section.key=value overrides one setting. -q and --debug may be
    given anywhere.
    """
    set_up_logging(logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO)


COMMANDS: dict[str, Callable[..., None]] = {
    "fetch": pipeline.fetch,
    "clean": pipeline.clean,
    "bpe": pipeline.bpe,
    "encode": pipeline.encode,
    "train": pipeline.train,
    "translate": translate.translate,
    "eval": translate.evaluate,
    "score": translate.score,
    "run": pipeline.run,
    "status": pipeline.status,
    "plan": tools.plan,
    "average": tools.average,
    "info": tools.info,
    "doctor": tools.doctor,
}
for _name, _command in COMMANDS.items():
    app.command(_name, context_settings=HELP)(_command)
app.add_typer(tools.config_app, name="config", context_settings=HELP)


def main() -> NoReturn:
    """Run the command of this process and exit with its code."""
    run_and_exit(lambda words: app(words, prog_name="nmt"), _general_first(sys.argv[1:]))


def run_and_exit(command: Callable[[Sequence[str]], object], words: Sequence[str]) -> NoReturn:
    """Run a command with these arguments and exit with its code; errors are printed as what, where and what next."""
    use_utf8()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        command(words)
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except NmtError as error:
        print(error, file=sys.stderr)
        problem: Exception = error
        code = error.exit_code
    except OSError as error:
        # A full disk, a folder without permission: for the user to correct, wherever it happened.
        if error.filename == STDOUT:
            _close_stdout()
        print(f"{describe_error(error)}. (--debug tells more.)", file=sys.stderr)
        problem, code = error, 1
    if logging.getLogger("nmt").level == logging.DEBUG:
        raise problem
    sys.exit(code)


def _close_stdout() -> None:
    """Discard unwritten output: the interpreter flushes stdout at exit, which would fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _general_first(words: list[str]) -> list[str]:
    """Move `-q`, `--quiet` and `--debug` in front of the command."""
    end = words.index("--") if "--" in words else len(words)
    general = [word for word in words[:end] if word in ("-q", "--quiet", "--debug")]
    return general + [word for word in words[:end] if word not in general] + words[end:]
