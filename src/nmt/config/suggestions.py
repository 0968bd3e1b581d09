"""Which setting a wrong name was meant to be: "did you mean"."""

import dataclasses
import difflib

from nmt.config.schema import SECTIONS

MOST_EDITS = 2
"""Letters added, left out, changed or swapped in a name that is still taken for a slip of the other one."""

TRAINING = {"optim", "train", "runtime"}
"""The sections of a training, among which one may guess wrong."""

_ALSO_CALLED = {
    # In nmt 0.1 (what has only moved to another section is found by its name), and in other toolkits where their name
    # has no word of ours, or the words of something else.
    "data.src": "source source_lang",
    "data.tgt": "target target_lang",
    "bpe.character_coverage": "coverage",
    "bpe.user_symbols": "user_defined_symbols",
    "bpe.shared_vocab": "joint share_all_embeddings joined_dictionary",
    "encode.max_tokens": "max_seq_len max_source_length max_source_positions",
    "model.layers": "encoder_layers",
    "model.d_model": "hidden_size embed_dim encoder_embed_dim dim",
    "model.d_ff": "ffn_dim encoder_ffn_embed_dim intermediate_size",
    "model.norm_order": "norm encoder_normalize_before",
    "model.norm_type": "norm_kind",
    "optim.eps": "adam_eps adam_epsilon",
    "optim.clip_norm": "grad_clip max_grad_norm",
    "optim.schedule": "lr_scheduler lr_scheduler_type",
    "optim.learning_rate": "lr",
    "optim.warmup_steps": "warmup_updates",
    "train.batch_tokens": "batch_size max_tokens max_tokens_per_batch update_freq",
    "train.max_steps": "steps epochs max_epochs num_epochs max_update max_updates",
    "train.precision": "fp16 bf16 amp dtype",
    "train.validate_every": "eval_steps validate_interval_updates",
    "train.early_stop_metric": "stop_on best_checkpoint_metric metric_for_best_model",
    "train.early_stop_patience": "patience",
    "train.save_every": "checkpoint_interval save_interval_updates",
    "train.keep_checkpoints": "keep keep_interval_updates save_total_limit",
    "runtime.log_every": "log_interval logging_steps",
    "runtime.collective_timeout": "timeout",
    "runtime.heartbeat_timeout": "silence",
    "translate.beam": "num_beams",
    "translate.alpha": "lenpen length_penalty_alpha",
    "translate.beam_patience": "translate.patience",
    "translate.max_length_offset": "max_extra max_len_b",
    "translate.max_source_tokens": "max_input",
}

OTHER_NAMES = {other: setting for setting, others in _ALSO_CALLED.items() for other in others.split()}
"""What a setting is called elsewhere: `name`, or `section.name` where the section decides."""


def nearest(name: str, within: str) -> str:
    """The setting that `within.name` was probably meant to be, as `section.key`, or nothing; `within` may be wrong too.

    What it was called before, or other toolkits call it; the name with the fewest edits, of equals the one in the
    nearest section (the three of a training are near each other); the one with these initials; the one that shares most
    of its words; else what looks most like it.
    """
    if other := OTHER_NAMES.get(f"{within}.{name}".lower()) or OTHER_NAMES.get(name.lower()):
        return other
    paths = {(s, f.name): f"{s}.{f.name}" for s, kind in SECTIONS.items() for f in dataclasses.fields(kind)}
    edits = {
        path: (count_edits(name, key), count_edits(within, section), {within, section} - TRAINING != set())
        for (section, key), path in paths.items()
    }
    best = min(edits, key=lambda path: edits[path])
    if edits[best][0] <= MOST_EDITS and edits[best][0] < len(name):
        return best
    words = {path: set(key.split("_")) for (_, key), path in paths.items()}
    short = [path for (_, key), path in paths.items() if "_" in key and name == "".join(w[0] for w in key.split("_"))]
    mine = set(name.lower().split("_"))
    alike = {path: len(mine & theirs) / len(mine | theirs) for path, theirs in words.items() if mine & theirs}
    for found in (short, [path for path in alike if alike[path] == max(alike.values())]):
        if found:
            return min(found, key=lambda path: edits[path][1])
    near = difflib.get_close_matches(name, [key for _, key in paths], 1, 0.6)
    same = [path for (_, key), path in paths.items() if key in near]
    return min(same, key=lambda path: edits[path][1], default="")


def count_edits(one: str, other: str) -> int:
    """How many letters must be added, left out, changed or swapped with their neighbour; at most MOST_EDITS + 1."""
    if abs(len(one) - len(other)) > MOST_EDITS:
        return MOST_EDITS + 1
    before, last = [0], list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            fewest = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and (a, b) == (other[j - 2], one[i - 2]):
                fewest = min(fewest, before[j - 2] + 1)
            row.append(fewest)
        before, last = last, row
    return min(last[-1], MOST_EDITS + 1)
