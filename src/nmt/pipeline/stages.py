"""The pipeline: six stages from raw text to a score, and an overview of the whole project.

raw text -> clean -> bpe -> encode -> train -> translate -> eval
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nmt.config import Config, check_name, of_kind
from nmt.errors import DataError
from nmt.io import write_json
from nmt.pipeline import engine
from nmt.pipeline.engine import Stage, cached_hashes, make_stage
from nmt.runs.identity import TrainPaths, training_reads, training_settings
from nmt.runs.run_dir import RUNS, RunDir

log = logging.getLogger(__name__)

DATA = Path("data")


class Stages(NamedTuple):
    """The six stages, in order."""

    clean: Stage
    bpe: Stage
    encode: Stage
    train: Stage
    translate: Stage
    evaluate: Stage


Trainer = Callable[[Config, TrainPaths], None]
"""Does a training: in this process, or in several that it starts."""


def run_folder(config: Config, name: str | None = None) -> RunDir:
    """Where a training lives: `runs/RECIPE.SRC-TGT`, or `runs/NAME`."""
    if name is None:
        name = f"{config.recipe}.{config.direction}"
        check_name("the name of the run (RECIPE.SRC-TGT; --name gives another)", name)
    else:
        check_name("--name", name)
    return RunDir(RUNS / name)


def build_stages(
    config: Config,
    name: str | None = None,
    *,
    device: str = "auto",
    trainer: Trainer | None = None,
    allow_overlap: bool = False,
) -> Stages:
    """The six stages as they are now; `name` is that of the run, `trainer` does the training (default: right here).

    With `allow_overlap` a test set is scored though the run was trained on some of it.
    """
    from nmt.corpus import find_sources

    corpus, run = DATA / config.data.corpus, run_folder(config, name)
    languages, direction = config.clean.columns, {"src": config.data.src, "tgt": config.data.tgt}
    src, tgt = direction.values()
    found = find_sources(corpus, config.clean)
    sources: dict[str, tuple[str | Path, ...]] = {
        **{f"source {source}": files for source, files in found.items()},
        "dev": config.clean.dev,
        "test": config.clean.test,
    }
    train_text, dev_text, test_text = ([f"{split}.{lang}" for lang in languages] for split in ("train", "dev", "test"))
    here = partial(train_here, device=device)
    models = ["joint.model"] if config.bpe.shared_vocab else [f"{lang}.model" for lang in languages]

    with cached_hashes(DATA / ".hashes.json") as content_hash:
        make = partial(make_stage, content_hash=content_hash)

        def data_stage(name: str, **facts: Any) -> Stage:
            return make(name, writes=corpus / name, numbered=True, **facts)

        clean: Stage = data_stage(
            "clean",
            reads={f"{source}/{i}": Path(path) for source, files in sources.items() for i, path in enumerate(files, 1)},
            # Of equal pairs the first one is kept, so several sources have an order.
            settings={"clean": _without(of_kind(config.clean, "result"), "sources", "dev", "test")}
            | ({"sources": list(found)} if len(found) > 1 else {}),
            action=lambda out: _clean(config, corpus, clean.hashes, out),
            packages=("nmt", "opencc"),
            format=2,
        )
        bpe = data_stage(
            "bpe",
            reads=_files(clean, train_text + dev_text)
            | {f"model/{i}": Path(path) for i, path in enumerate(config.bpe.model, 1)},
            settings={"languages": list(languages), "bpe": _without(of_kind(config.bpe, "result"), "dropout", "model")},
            action=partial(_bpe, config, clean.writes),
            packages=("nmt", "sentencepiece"),
        )
        encode = data_stage(
            "encode",
            reads=_files(clean, train_text + dev_text + test_text) | _files(bpe, models),
            settings={"languages": list(languages), "encode": of_kind(config.encode, "result")},
            action=partial(_encode, config, clean.writes, bpe.writes),
            packages=("nmt", "sentencepiece"),
        )
        paths = TrainPaths(clean=clean.writes, bpe=bpe.writes, encode=encode.writes, run=run)
        train = make(
            "train",
            reads=training_reads(config, paths),
            settings=training_settings(config),
            writes=run,
            result="final",
            action=partial(_train, config, paths, trainer or here),
            packages=("nmt", "torch"),
        )
        translate = make(
            "translate",
            reads={name: run / name for name in ("final", "tokenizer", "normalisation.json")}
            | _files(clean, [f"test.{src}"]),
            settings={"data": direction, "translate": of_kind(config.translate, "result")},
            writes=run.translation,
            action=partial(_translate, config, run, clean.writes, device),
            packages=("nmt", "torch", "sentencepiece", "opencc"),
        )
        evaluated = [*train_text, *test_text, f"test.refs.{tgt}", "report.json"]
        evaluated += ["test.attribution"] if (clean.writes / "test.attribution").is_file() else []
        evaluate = make(
            "eval",
            reads=_files(translate, ["test.hyp"]) | _files(clean, evaluated) | {"train_keys": run.train_keys},
            settings={"data": direction, "eval": of_kind(config.eval, "result")},
            writes=run.evaluation,
            action=partial(_evaluate, config, clean.writes, run, allow_overlap),
            packages=("nmt", "sacrebleu"),
        )
    return Stages(clean, bpe, encode, train, translate, evaluate)


def run_pipeline(config: Config, name: str | None = None, *, device: str = "auto", upto: str | None = None) -> Stages:
    """Bring the stages up to date, up to and including `upto`, and return them; the training is in this process.

    `name` is that of the run, else RECIPE.SRC-TGT. Raises NmtError for what `nmt run` would report.
    """
    return engine.run(partial(build_stages, config, name, device=device), upto)


def _files(stage: Stage, names: Iterable[str]) -> dict[str, Path]:
    """Files that an earlier stage writes, as a later one reads them."""
    return {f"{stage.name}/{name}": stage.writes / name for name in names}


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


# ── what each stage does; imports are inside, so that a stage that is up to date loads nothing ────────────────────────


def _clean(config: Config, corpus: Path, hashes: Mapping[str, str], out: Path) -> None:
    """Clean the files, which must have the content `hashes`; where nothing is left, say where the dropped rows are."""
    from nmt.corpus import NothingLeft, clean_corpus, find_sources

    rejected = corpus / "rejected.tsv"
    rejected.unlink(missing_ok=True)
    sources = find_sources(corpus, config.clean)
    files = [str(path) for paths in sources.values() for path in paths]
    log.info("clean: reading %s", ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else ""))
    try:
        report = clean_corpus(sources, config.clean, out)
    except NothingLeft as error:
        (out / rejected.name).replace(rejected)
        raise DataError(f"{error} Each dropped row is in {rejected}.") from error
    facts = {f"source {name}": source["files"] for name, source in report["sources"].items()} | report["given"]
    for name, cleaned in facts.items():
        for i, file in enumerate(cleaned, 1):
            if hashes.get(f"{name}/{i}") != file["sha256"]:
                raise DataError(
                    f"{file['file']} is not what it was when its hash was taken. Run it again when nothing writes to "
                    f"it; if that says the same, delete {DATA / '.hashes.json'}."
                )


def _bpe(config: Config, clean: Path, out: Path) -> None:
    from nmt.data.train_tokenizer import train_bpe

    train_bpe(clean, config.bpe, (config.clean.columns[0], config.clean.columns[1]), out)


def _encode(config: Config, clean: Path, bpe: Path, out: Path) -> None:
    from nmt.data.dataset import encode_corpus

    encode_corpus(clean, bpe, config.encode, config.clean.columns, out)


def _train(config: Config, paths: TrainPaths, trainer: Trainer, run: Path) -> None:
    from nmt.evaluation.metrics import check_tokenizer
    from nmt.io import read_lines

    # Else dev BLEU, which stops a training and chooses its weights, would mean nothing.
    check_tokenizer(read_lines(paths.clean / f"dev.{config.data.tgt}"), config.data.tgt, "the sentences of the dev set")
    trainer(config, paths)


def train_here(
    config: Config, paths: TrainPaths, *, device: str, fresh: bool = False, init_from: Path | None = None
) -> None:
    """Train in this process, which may be one of several that were started together."""
    from nmt.distributed.launcher import is_main
    from nmt.training.plan import cpu_warning

    # Before torch is imported and before the processes meet: who comes second is told at once.
    with paths.run.locked() if is_main() else contextlib.nullcontext():
        if is_main() and (warning := cpu_warning(config, paths.encode, device)):
            log.warning("train: %s", warning)
        from nmt.distributed.world import init_distributed
        from nmt.training.loop import train_model

        with init_distributed(device, config.runtime.collective_timeout) as world:
            train_model(config, paths, world, fresh=fresh, init_from=init_from)


def _translate(config: Config, run: Path, clean: Path, device: str, out: Path) -> None:
    from nmt.decoding.files import translate_file
    from nmt.decoding.translator import Translator

    translator = Translator.load(run, config.translate, device=device)
    translate_file(translator, clean / f"test.{config.data.src}", out / "test.hyp")


def _evaluate(config: Config, clean: Path, run: RunDir, allow_overlap: bool, out: Path) -> None:
    from nmt.evaluation.test_set import evaluate_test, read_test_set
    from nmt.io import read_lines
    from nmt.runs.opening import source_code
    from nmt.runs.overlap import check_unseen

    hyps = read_lines(run.hypotheses_file)
    srcs, refs = read_test_set(clean, config.data.src, config.data.tgt)
    seen = check_unseen(run, config.data.src, srcs, refs, allow_overlap)
    found = evaluate_test(config, clean, hyps, trained_on=seen)
    write_json(out / "scores.json", found | {"code": source_code()})
