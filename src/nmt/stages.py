"""The street: six stages, from raw text to a score. This page shows the whole project.

raw text -> clean -> bpe -> encode -> train -> translate -> eval
"""

import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmt.config import Config, to_dict
from nmt.pipeline import Stage, make_stage, numbered, remembered_hashes
from nmt.runs import RUNS
from nmt.text import write_json

if TYPE_CHECKING:
    from nmt.provenance import TrainPaths

log = logging.getLogger(__name__)

DATA = Path("data")

Trainer = Callable[[Config, "TrainPaths"], None]
"""Does a training: in this process, or in several that it starts."""


def run_folder(config: Config, name: str | None = None) -> Path:
    """Where a training lives: `runs/RECIPE.SRC-TGT`, or `runs/NAME`."""
    return RUNS / (name or f"{config.recipe}.{config.direction}")


def street(
    config: Config, name: str | None = None, *, device: str = "auto", trainer: Trainer | None = None
) -> list[Stage]:
    """The six stages as they are now; `name` is that of the run, `trainer` does the training (default: right here)."""
    from nmt.corpus import find_sources

    corpus, run = DATA / config.data.corpus, run_folder(config, name)
    languages, direction = config.clean.columns, {"src": config.data.src, "tgt": config.data.tgt}
    src, tgt = direction.values()
    sources: dict[str, tuple[str | Path, ...]] = {
        **{f"source {source}": files for source, files in find_sources(corpus, config.clean).items()},
        "dev": config.clean.dev,
        "test": config.clean.test,
    }
    train_text, dev_text, test_text = ([f"{split}.{lang}" for lang in languages] for split in ("train", "dev", "test"))
    here = partial(train_here, device=device)
    models = ["joint.model"] if config.bpe.joint else [f"{lang}.model" for lang in languages]

    with remembered_hashes(DATA / ".hashes.json") as content_hash:
        make = partial(make_stage, content_hash=content_hash)

        def data_stage(name: str, **facts: Any) -> Stage:
            return numbered(make(name, writes=corpus / name, **facts))

        clean = data_stage(
            "clean",
            reads={f"{source}/{i}": Path(path) for source, files in sources.items() for i, path in enumerate(files, 1)},
            settings={"clean": _without(to_dict(config.clean), "sources", "dev", "test")},
            action=partial(_clean, config, corpus),
        )
        bpe = data_stage(
            "bpe",
            reads=_files(clean, train_text + dev_text)
            | {f"model/{i}": Path(path) for i, path in enumerate(config.bpe.model, 1)},
            settings={"languages": list(languages), "bpe": _without(to_dict(config.bpe), "dropout", "model")},
            action=partial(_bpe, config, clean.writes),
        )
        encode = data_stage(
            "encode",
            reads=_files(clean, train_text + dev_text + test_text) | _files(bpe, models),
            settings={"languages": list(languages), "encode": to_dict(config.encode)},
            action=partial(_encode, config, clean.writes, bpe.writes),
        )
        # With BPE-dropout the training text is encoded afresh in each epoch, so the text is read as well.
        dropout = config.bpe.dropout
        trained_text = ["normalisation.json", *dev_text, *(train_text if dropout else [])]
        train = make(
            "train",
            reads={"encode": encode.writes} | _files(bpe, models) | _files(clean, trained_text),
            settings={"data": direction, "bpe": {"dropout": dropout}}
            | {"model": to_dict(config.model), "optim": to_dict(config.optim)},
            writes=run,
            result="final",
            action=partial(_train, config, clean.writes, bpe.writes, encode.writes, trainer or here),
        )
        translate = make(
            "translate",
            reads={"final": run / "final"} | _files(clean, [f"test.{src}"]),
            settings={"data": direction, "translate": to_dict(config.translate)},
            writes=run / "translate",
            action=partial(_translate, config, run, clean.writes, device),
        )
        evaluated = [*train_text, *test_text, f"test.refs.{tgt}"]
        evaluated += ["test.attribution"] if (clean.writes / "test.attribution").is_file() else []
        evaluate = make(
            "eval",
            reads=_files(translate, ["test.hyp"]) | _files(clean, evaluated),
            settings={"data": direction, "eval": to_dict(config.eval)},
            writes=run / "eval",
            action=partial(_evaluate, config, clean.writes, translate.writes),
        )
    return [clean, bpe, encode, train, translate, evaluate]


def _files(stage: Stage, names: Iterable[str]) -> dict[str, Path]:
    """Files that an earlier stage writes, as a later one reads them."""
    return {f"{stage.name}/{name}": stage.writes / name for name in names}


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


# ── what each stage does; imports are inside, so that a street that is fresh loads nothing ──────────────────────────


def _clean(config: Config, corpus: Path, out: Path) -> None:
    from nmt.corpus import clean_corpus, find_sources

    sources = find_sources(corpus, config.clean)
    files = [str(path) for paths in sources.values() for path in paths]
    log.info("clean: reading %s", ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else ""))
    clean_corpus(sources, config.clean, out)


def _bpe(config: Config, clean: Path, out: Path) -> None:
    from nmt.tokenizer import train_bpe

    train_bpe(clean, config.bpe, (config.clean.columns[0], config.clean.columns[1]), out)


def _encode(config: Config, clean: Path, bpe: Path, out: Path) -> None:
    from nmt.dataset import encode_corpus

    encode_corpus(clean, bpe, config.encode, config.clean.columns, out)


def _train(config: Config, clean: Path, bpe: Path, encode: Path, trainer: Trainer, run: Path) -> None:
    from nmt.provenance import TrainPaths

    trainer(config, TrainPaths(clean=clean, bpe=bpe, encode=encode, run=run))


def train_here(
    config: Config, paths: "TrainPaths", *, device: str, fresh: bool = False, init_from: Path | None = None
) -> None:
    """Train in this process, which may be one of several that were started together."""
    from nmt.provenance import leads, lock

    # Before torch is imported and before the processes meet: who comes second is told at once.
    with lock(paths.run) if leads() else contextlib.nullcontext():
        from nmt.distributed import join
        from nmt.training import train_model

        with join(device, config.train.timeout) as world:
            train_model(config, paths, world, fresh=fresh, init_from=init_from)


def _translate(config: Config, run: Path, clean: Path, device: str, out: Path) -> None:
    from nmt.translate_files import translate_file
    from nmt.translation import Translator

    translator = Translator.load(run, config.translate, device=device)
    translate_file(translator, clean / f"test.{config.data.src}", out / "test.hyp")


def _evaluate(config: Config, clean: Path, translated: Path, out: Path) -> None:
    from nmt.evaluation import evaluate_test
    from nmt.text import read_lines

    write_json(out / "scores.json", evaluate_test(config, clean, read_lines(translated / "test.hyp")))
