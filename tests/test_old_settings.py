"""Names of the first version: each is still a setting, or is answered with what it is called now; and its runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forked import nmt
from nmt import config
from nmt.errors import ConfigError

OLD = {
    "data": "corpus src tgt",
    "clean": "sources columns encoding dev test dev_size test_size seed zh_script max_words max_units min_ratio"
    " max_ratio max_byte_ratio min_han_share max_han_share drop_damaged drop_copies drop_markup drop_pinyin drop_kana"
    " drop_cantonese drop_numbers",
    "bpe": "vocab_size coverage dropout user_symbols joint model",
    "encode": "max_tokens",
    "model": "layers decoder_layers d_model d_ff heads kv_heads norm norm_kind norm_eps activation position"
    " max_positions dropout attention_dropout activation_dropout",
    "optim": "batch_tokens length_buckets label_smoothing clip_norm optimizer beta1 beta2 eps weight_decay schedule"
    " learning_rate lr_factor warmup_steps max_steps patience stop_on seed precision",
    "train": "device_tokens validate_every validate_sentences save_every save_minutes log_every keep compile timeout"
    " silence",
    "translate": "beam alpha length_penalty patience max_extra batch_tokens max_input precision",
    "eval": "metrics bootstrap seed",
}
NEW = {
    "bpe.coverage": "bpe.character_coverage",
    "bpe.joint": "bpe.shared_vocab",
    "model.norm": "model.norm_order",
    "model.norm_kind": "model.norm_type",
    "optim.batch_tokens": "train.batch_tokens",
    "optim.length_buckets": "train.length_buckets",
    "optim.label_smoothing": "train.label_smoothing",
    "optim.max_steps": "train.max_steps",
    "optim.patience": "train.early_stop_patience",
    "optim.stop_on": "train.early_stop_metric",
    "optim.seed": "train.seed",
    "optim.precision": "train.precision",
    "train.device_tokens": "runtime.device_tokens",
    "train.save_minutes": "runtime.save_minutes",
    "train.log_every": "runtime.log_every",
    "train.keep": "train.keep_checkpoints",
    "train.compile": "runtime.compile",
    "train.timeout": "runtime.collective_timeout",
    "train.silence": "runtime.heartbeat_timeout",
    "translate.patience": "translate.beam_patience",
    "translate.max_extra": "translate.max_length_offset",
    "translate.max_input": "translate.max_source_tokens",
}


def test_every_old_name_is_a_setting_or_has_a_new_one() -> None:
    names = {f"{section}.{name}" for section, old in OLD.items() for name in old.split()}
    known = {f"{section}.{name}" for section, kind in config.SECTIONS.items() for name in config.kinds(kind)}
    assert names - known == NEW.keys()
    assert set(NEW.values()) <= known


@pytest.mark.parametrize(("old", "new"), NEW.items())
def test_an_old_name_is_answered_with_the_new_one_wherever_it_stands(tmp_path: Path, old: str, new: str) -> None:
    section, name = old.split(".")
    (tmp_path / "old.yaml").write_text(f"{section}:\n  {name}: 1\n")
    for file, changes in ((None, [f"{old}=1"]), (str(tmp_path / "old.yaml"), [])):
        with pytest.raises(ConfigError) as caught:
            config.load(file, changes)
        (problem,) = caught.value.problems
        assert problem.startswith(f"unknown setting {old} (")
        assert problem.endswith(f"; did you mean {new}?")
    if name not in ("patience", "batch_tokens", "seed", "precision"):  # Those say too little without their section.
        with pytest.raises(ConfigError, match=rf"Did you mean {new}\?"):
            config.load(None, [f"{name}=1"])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        # fairseq
        ("max_tokens=4096", "train.batch_tokens"),
        ("dataset.max_tokens=4096", "train.batch_tokens"),
        ("optim.update_freq=4", "train.batch_tokens"),
        ("optim.max_update=1000", "train.max_steps"),
        ("optim.warmup_updates=1000", "optim.warmup_steps"),
        ("train.patience=5", "train.early_stop_patience"),
        ("train.keep_interval_updates=5", "train.keep_checkpoints"),
        ("train.best_checkpoint_metric=bleu", "train.early_stop_metric"),
        ("train.log_interval=5", "runtime.log_every"),
        ("model.share_all_embeddings=true", "bpe.shared_vocab"),
        ("model.encoder_normalize_before=true", "model.norm_order"),
        ("model.encoder_embed_dim=512", "model.d_model"),
        ("translate.max_len_b=50", "translate.max_length_offset"),
        # Sockeye
        ("train.checkpoint_interval=500", "train.save_every"),
        ("encode.max_seq_len=95", "encode.max_tokens"),
        ("translate.length_penalty_alpha=1", "translate.alpha"),
        ("translate.beam_size=5", "translate.beam"),
        # transformers
        ("train.save_total_limit=5", "train.keep_checkpoints"),
        ("train.metric_for_best_model=bleu", "train.early_stop_metric"),
        ("train.early_stopping_patience=5", "train.early_stop_patience"),
        ("train.logging_steps=5", "runtime.log_every"),
        ("train.eval_steps=5", "train.validate_every"),
        ("train.torch_compile=true", "runtime.compile"),
        ("optim.adam_epsilon=1e-9", "optim.eps"),
        ("optim.adam_beta2=0.9", "optim.beta2"),
        ("optim.lr_scheduler_type=cosine", "optim.schedule"),
        ("model.num_attention_heads=8", "model.heads"),
        ("translate.num_beams=5", "translate.beam"),
        ("translate.max_source_length=5", "encode.max_tokens"),
        # SentencePiece
        ("bpe.user_defined_symbols=[a]", "bpe.user_symbols"),
    ],
)
def test_the_name_of_another_toolkit_is_answered_with_ours(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"[Dd]id you mean {meant}\?"):
        config.load(None, [typed])


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


FILES = ("config", "identity", "stamp")


def as_before(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as the first version wrote them into a run."""
    old: dict[str, Any] = {name: value for name, value in settings.items() if name == "recipe"}
    for section, names in OLD.items():
        places = {name: NEW.get(f"{section}.{name}", f"{section}.{name}").split(".") for name in names.split()}
        old[section] = {name: settings[at][key] for name, (at, key) in places.items() if key in settings.get(at, {})}
    return old


@pytest.fixture(scope="module")
def old_run(pipeline_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run as the first version left it."""
    folder = tmp_path_factory.mktemp("old") / "folder"
    shutil.copytree(pipeline_run, folder)
    run = folder / "runs/tiny.en-zh"
    settings, identity, stamp = (json.loads((run / f"{name}.json").read_text()) for name in FILES)
    identity |= {"format": 3, "settings": as_before(identity["settings"])}
    stamp |= {"settings": as_before(stamp["settings"]), "fingerprint": "0" * 64}
    for name, content in zip(FILES, (as_before(settings), identity, stamp), strict=True):
        (run / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("translate --run runs/tiny.en-zh", "another version of nmt (unknown setting bpe.coverage"),
        ("eval --run runs/tiny.en-zh", "another version of nmt (unknown setting bpe.coverage"),
        ("info runs/tiny.en-zh", "another version of nmt (unknown setting bpe.coverage"),
        ("average runs/tiny.en-zh", "another version of nmt (unknown setting bpe.coverage"),
        ("train -c tiny.yaml", "identity.json has format 3, this nmt reads 4; start over with nmt train --fresh"),
        ("run -c tiny.yaml", "identity.json has format 3, this nmt reads 4; start over with nmt train --fresh"),
        ("train -c tiny.yaml --name new --init-from runs/tiny.en-zh", "another version of nmt (unknown setting"),
    ],
)
def test_a_run_of_the_first_version_is_refused_in_one_line(old_run: Path, words: str, told: str) -> None:
    ended = nmt(old_run, *words.split())
    assert ended.code == 1
    assert told in ended.told.removesuffix("\n").split("\n")[-1]
    assert "Traceback" not in ended.told


def test_a_run_of_the_first_version_can_be_started_over(old_run: Path, tmp_path: Path) -> None:
    shutil.copytree(old_run, tmp_path / "folder")
    assert nmt(tmp_path / "folder", "train", "-c", "tiny.yaml", "--fresh").code == 0
    assert nmt(tmp_path / "folder", "info", "runs/tiny.en-zh").code == 0
