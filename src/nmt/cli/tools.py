"""The other commands: plan, average, info, doctor, config."""

import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from nmt import config as settings
from nmt.cli.options import AsJson, Changes, ConfigFile, Device, Recipe, load, print_result, table
from nmt.errors import ConfigError, DataError
from nmt.pipeline import engine, stages
from nmt.runs.listing import describe_run, run_table
from nmt.runs.run_dir import RunDir, newest_run

log = logging.getLogger(__name__)

config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show or check the settings.")


def plan(
    config: Recipe = None,
    changes: Changes = None,
    device: Device = "auto",
    measure: Annotated[bool, typer.Option("--measure", help="Time a few real steps.")] = False,
    as_json: AsJson = False,
) -> None:
    """Estimate time, memory and epochs of a training."""
    from nmt.training import plan as planning

    loaded = load(config, changes)
    build = partial(stages.build_stages, loaded)
    if measure:
        engine.run(build, "encode")
    try:
        made = build()
        data = planning.look_at_data(loaded, list(made.clean.reads.values()), made.clean.writes, made.encode.writes)
    except DataError as error:
        log.info("%s", error)
        data = None
    from nmt.distributed.world import choose_device, gpu_of, has_cuda

    kind, gpu = device.partition(":")[0], None
    if kind not in ("cpu", "cuda", "mps"):  # A plan for a GPU may be made where there is none.
        kind = choose_device(device).type
    if kind == "cuda" and has_cuda():
        gpu = gpu_of(choose_device(device))
    found = planning.make_plan(loaded, data, kind, gpu)
    if measure:
        found["measured"] = planning.measure(loaded, build().encode.writes, device)
    print_result(found, planning.plan_lines(found), as_json)


def average(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, help="Number of newest checkpoints.")] = 5,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FOLDER", help="Write the average here without comparing.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Make the average final without comparing on the dev set.")
    ] = False,
    restore: Annotated[
        bool, typer.Option("--restore", help="Restore the final model that an average replaced.")
    ] = False,
    device: Device = "auto",
) -> None:
    """Average the newest checkpoints, and keep the better model."""
    from nmt.runs.run_dir import read_config

    if restore and (output or force):
        raise ConfigError("--restore goes without --force and --output: it brings back what an average replaced.")
    run_dir = RunDir(run)
    read_config(run_dir)  # Before a lock is put into what is no run.
    with run_dir.locked(), engine.replacing_result(run_dir, "final"):
        from nmt.training.averaging import average_checkpoints, restore_final

        if restore:
            restore_final(run_dir)
            log.info("average: the final model of %s is the former one again", run)
            return
        found = average_checkpoints(run_dir, last, output, device, force)
    if found.scores:
        scores = ", ".join(f"{name} has {score:.2f}" for name, score in found.scores.items())
        log.info("average: %s on the whole dev set: %s", found.measure, scores)
    if found.folder != run_dir.final:
        stays = "" if output else "; the final model stays, since that is not better (--force replaces it)"
        log.info("average: the %s is %s%s", found.name, found.folder, stays)
    else:
        way = f"; the former one is {run_dir.former_final} (nmt average {run} --restore)" if found.former else ""
        log.info("average: the final model of %s is the %s now%s", run, found.name, way)


def info(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run folder; default: the newest finished run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run: state, scores, sizes."""
    facts = describe_run(RunDir(run or newest_run()))
    print_result(facts, table(run_table(facts)), as_json)


def doctor(
    config: ConfigFile = None, changes: Changes = None, device: Device = "auto", as_json: AsJson = False
) -> None:
    """Check that training resumes and decodes correctly here."""
    recipe = config or "demo"
    loaded = settings.load(recipe, changes or ())
    from nmt.diagnostics import doctor as checks
    from nmt.diagnostics.trial_runs import options
    from nmt.distributed import host
    from nmt.distributed.world import choose_device

    facts = host.describe(choose_device(device))
    if not as_json:
        print_result(facts, host.lines(facts), as_json)  # At once: the proofs take their time.
    words = ["-c", recipe, *options(changes or ())]
    made = engine.run(partial(stages.build_stages, loaded), "encode")
    found = checks.run_checks(loaded, words, made.clean.writes, made.bpe.writes, device)
    failed = [name for name, proof in found.items() if proof.outcome == "failed"]
    facts |= {"recipe": loaded.recipe, "corpus": loaded.data.corpus, "direction": loaded.direction}
    facts |= {"proofs": {name: asdict(proof) for name, proof in found.items()}, "passed": not failed}
    print_result(facts, checks.lines(found), as_json)
    if failed:
        raise typer.Exit(1)


@config_app.command("show")
def show(config: ConfigFile = None, changes: Changes = None, as_json: AsJson = False) -> None:
    """Print every setting with its description, kind and origin."""
    loaded, origins = settings.load_with_origins(config, changes or ())
    print_result(settings.to_dict(loaded), settings.show(loaded, origins), as_json)


@config_app.command("check")
def check(config: ConfigFile = None, changes: Changes = None) -> None:
    """Check a settings file, and report all of its errors."""
    loaded = settings.load(config, changes or ())
    typer.echo(f"{loaded.recipe}: all settings are good ({loaded.data.corpus}, {loaded.direction}).")
