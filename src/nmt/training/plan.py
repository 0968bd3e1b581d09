"""The cost of a training, estimated from the settings and the lengths of the data."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmt.config import Config, ModelConfig, OptimConfig, TranslateConfig
from nmt.distributed import gpu_defaults
from nmt.distributed.gpu_defaults import Gpu
from nmt.distributed.launcher import cores, is_cpu
from nmt.io import read_json
from nmt.model.flops import parameters, training_flops
from nmt.training.metrics_logger import duration

BYTES_A_TOKEN = 3.3
"""UTF-8 bytes of a token with 8,000 pieces, English or Chinese; measured on everyday sentences."""

TOO_MANY_EPOCHS = 300
"""Good recipes for small corpora take 50 to 200; far beyond, a model only overfits."""

LONG_HOURS = 12
"""Hours of a training on a CPU from which it is warned of before it starts."""

CORE_FLOPS = 40e9
"""Operations a second of a CPU core in training, float32: four tenths of its matrix products (docs/performance.md)."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training set as numbers; tokens include each sentence's eos."""

    pairs: int
    src_tokens: int
    tgt_tokens: int
    longest: int
    """Tokens of the longest side of any pair."""
    updates: int
    """In an epoch."""
    vocab: tuple[int, int]
    """Pieces of the source's and of the target's vocabulary."""
    exact: bool
    """Counted in encoded data; else estimated from the size of the text."""


# ── formulas ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def activation_bytes(model: ModelConfig, src_slots: int, tgt_slots: int, half: bool, device: str = "cpu") -> int:
    """What the backward pass of a micro-batch keeps, but for the loss, which works in chunks.

    Of an attention block: query, keys and values, what was found, the dropout mask, the sum and its norm. Of a
    feed-forward block: the inner activations, mask, sum and norm. With `half` (autocast) the sums stay float32, and
    instead of its norm each projection keeps a copy of its own. Masks are bytes on a GPU, numbers on a CPU.
    """
    width, inner, size = model.d_model, model.d_ff, 2 if half else 4
    mask_size = size if device == "cpu" else 1
    kv_width = 2 * (model.kv_heads or model.heads) * width // model.heads
    inner_kept = size * {"relu": inner, "gelu": 2 * inner, "swiglu": 4 * inner}[model.activation]
    inner_kept += (size + mask_size) * inner if model.activation_dropout else 0
    mask = mask_size * width if model.dropout else 0
    # The sum of a block with what it was given; RMSNorm keeps what it divided as well.
    added = 4 * width * (2 if model.norm_type == "rms" else 1) + mask
    turned = kv_width // 2 if model.position == "rope" else 0
    attention = size * ((4 if half else 3) * width + kv_width + turned) + added
    cross, feed = size * 3 * width + added, size * width + inner_kept + added
    embedded = 4 * width + (4 if device == "cpu" else 1) * width * bool(model.dropout)
    decoder_layers = model.decoder_layers or model.layers
    memory = decoder_layers * size * (kv_width + (width if half else 0))
    src_bytes = model.layers * (attention + feed) + memory + embedded
    tgt_bytes = decoder_layers * (attention + cross + feed) + embedded
    return src_slots * src_bytes + tgt_slots * tgt_bytes


def attention_bytes(model: ModelConfig, slots: int, longest: int, device: str) -> int:
    """What attention keeps besides, if all sentences are `longest`: nothing, but where a CPU drops its weights out.

    Then torch stores the weights, the mask and their product for each block, and float32 queries, keys and values.
    """
    blocks = model.layers + 2 * (model.decoder_layers or model.layers)
    kept = blocks * slots * 4 * 3 * (model.heads * longest + model.d_model)
    return kept if model.attention_dropout and device == "cpu" else 0


def loss_bytes(width: int, vocab: int, tokens: int, half: bool, rows: int) -> int:
    """What the loss holds: `rows` rows of scores at a time, and of all tokens the hidden states and their gradient.

    Of each score: the product, its logarithm and, in half precision, both once more in the other type. Of the output
    matrix: its gradient, the same times the gradient of the loss and, in half precision, two copies.
    """
    scores = min(rows, tokens) * vocab * (2 + 4 + 4 + 2 if half else 4 + 4)
    return scores + tokens * width * (4 + (2 + 2 if half else 4)) + vocab * width * (4 + 4 + (2 + 2 if half else 0))


def cache_bytes(model: ModelConfig, longest: int, translate: TranslateConfig, batch_tokens: int, size: int) -> int:
    """The decoder's cache at its largest, over all source lengths up to `longest`: keys and values of `size` bytes.

    A batch has `batch_tokens` source tokens times beam, so short sentences make many rows, each of which may grow by
    max_length_offset tokens. Room doubles from 16 tokens on; while it does, the old half stands beside the new whole.
    """
    layers = model.decoder_layers or model.layers
    a_token = 2 * (model.kv_heads or model.heads) * model.d_model // model.heads * size

    def largest(length: int, sentences: int, room: int) -> int:
        grown = layers * room + (layers * room // 2 + room // 2 if room > 16 else 0)
        return sentences * a_token * (translate.beam * grown + layers * length)

    # What grows with the length is largest where the sentences become fewer or the room greater at the next length, so
    # only such lengths are looked at: `longest` may be any number that a settings file can hold.
    most, length, longest = 0, 2, max(2, longest)
    while length <= longest:
        sentences = max(1, batch_tokens // (length * translate.beam))
        room = 1 << max(4, (length + translate.max_length_offset - 1).bit_length())
        end = min(longest, room - translate.max_length_offset)
        if sentences > 1:
            end = min(end, batch_tokens // (sentences * translate.beam))
        most = max(most, largest(end, sentences, room))
        length = end + 1
    return most


def peak_rate(optim: OptimConfig, d_model: int) -> float:
    """The highest learning rate: that of the last step of the warm-up."""
    peak = 1 / math.sqrt(d_model * optim.warmup_steps) if optim.schedule == "noam" else optim.learning_rate
    return peak * optim.lr_factor


# ── the plan ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_plan(config: Config, data: Data | None, device: str = "cpu", gpu: Gpu | None = None) -> dict[str, Any]:
    """All numbers of the plan, for a kind of device; without data those that do not depend on it.

    `gpu` is the one at hand where `device` is cuda; else one of 80 GB is assumed.
    """
    from nmt.model.loss import CHUNK

    gpu = (gpu or gpu_defaults.ASSUMED) if device == "cuda" else None
    wanted, config = config, gpu_defaults.for_training(config, gpu)
    model, optim, train = config.model, config.optim, config.train
    src_vocab, tgt_vocab = data.vocab if data else (config.bpe.vocab_size, config.bpe.vocab_size)
    parts = parameters(model, tgt_vocab, None if config.bpe.shared_vocab else src_vocab)
    total = sum(parts.values())
    most = gpu_defaults.device_tokens(config.runtime.device_tokens, train.batch_tokens, 1, gpu)
    slots = min(most, math.ceil(gpu_defaults.PADDED * train.batch_tokens))
    longest = data.longest if data else config.encode.max_tokens
    half, slots = train.precision != "float32", max(slots, longest)
    # A CPU keeps float32 keys and values in every precision.
    cached = 4 if device == "cpu" or config.translate.precision == "float32" else 2
    together = gpu_defaults.translate_tokens(config.translate, model, cached, gpu)
    found: dict[str, Any] = {
        "recipe": config.recipe,
        "direction": config.direction,
        "parameters": parts | {"total": total},
        "optim": {"warmup_steps": optim.warmup_steps, "peak_learning_rate": peak_rate(optim, model.d_model)},
        "train": {"batch_tokens": train.batch_tokens, "max_steps": train.max_steps},
        "device": device,
        "auto": {
            name: value
            for name, setting, value in (
                ("train.precision", wanted.train.precision, train.precision),
                ("runtime.device_tokens", wanted.runtime.device_tokens, most),
                ("translate.batch_tokens", wanted.translate.batch_tokens, together),
            )
            if setting == "auto"
        },
        "memory": {
            "weights_gradients_moments": 16 * total,
            # Autocast keeps its copy of each weight until the backward pass.
            "half_precision_copies": 2 * (parts["encoder"] + parts["decoder"]) if half else 0,
            "activations": activation_bytes(model, slots, slots, half, device),
            "attention_weights": attention_bytes(model, slots, longest, device),
            "loss": loss_bytes(model.d_model, tgt_vocab, slots, half, CHUNK.get(device, CHUNK["cpu"])),
            "micro_batch_tokens": slots,
        },
        "attention": {
            "longest": longest,
            "weights_of_a_layer": 4 * max(1, slots // longest) * model.heads * longest**2,
            "decoder_cache": cache_bytes(model, longest, config.translate, together, cached),
        },
    }
    found["memory"]["total"] = sum(value for name, value in found["memory"].items() if name != "micro_batch_tokens")
    if data is not None:
        src, tgt = data.src_tokens / data.pairs, data.tgt_tokens / data.pairs
        flops = training_flops(model, tgt_vocab, src, tgt) * data.pairs / data.updates
        found["data"] = {
            "pairs": data.pairs,
            "src_tokens": data.src_tokens,
            "tgt_tokens": data.tgt_tokens,
            "exact": data.exact,
            "updates_an_epoch": data.updates,
            "warmup_epochs": optim.warmup_steps / data.updates,
            "epochs": train.max_steps / data.updates,
        }
        found["work"] = {"flops_a_step": flops, "flops": flops * train.max_steps}
    return found


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """The plan for people."""
    parts, optim, train = (plan[name] for name in ("parameters", "optim", "train"))
    memory, attention = plan["memory"], plan["attention"]
    stored = memory["attention_weights"]
    stored = f"with attention dropout a CPU does, {_size(stored)} in all" if stored else "they are not"
    copies = memory["half_precision_copies"]
    copies = f"their copies in half precision {_size(copies)}, " if copies else ""
    shown = ", ".join(f"{name} {value / 1e6:.1f} M" for name, value in parts.items() if value and name != "total")
    lines = [
        f"{plan['recipe']}, {plan['direction']}",
        f"parameters  {parts['total'] / 1e6:.1f} M: {shown}",
    ]
    data = plan.get("data")
    if data:
        about = "" if data["exact"] else "about "
        lines += [
            f"data        {about}{data['pairs']:,} pairs, {data['src_tokens']:,} source and {data['tgt_tokens']:,} "
            f"target tokens{'' if data['exact'] else ' (estimated; nmt encode counts them)'}",
            f"updates     {about}{data['updates_an_epoch']:,} an epoch, of {train['batch_tokens']:,} tokens a side",
            f"training    {train['max_steps']:,} steps = {data['epochs']:,.0f} epochs; "
            f"warm-up {optim['warmup_steps']:,} steps = {data['warmup_epochs']:,.1f} epochs",
        ]
    else:
        lines.append(
            "data        none yet, so nothing can be said of epochs: nmt fetch, or nmt run -c FILE --upto encode"
        )
    if meant := plan["auto"]:
        shown = ", ".join(
            f"{name} {value if isinstance(value, str) else f'{value:,}'}" for name, value in meant.items()
        )
        found = plan["device"] == "cuda" and "runtime.device_tokens" in meant
        lines.append(
            f"auto        on {plan['device']}: {shown}" + (" or what fits, found before the first step" * found)
        )
    lines += [
        f"rate        at most {optim['peak_learning_rate']:.3g}, at step {optim['warmup_steps']:,}",
        f"memory      {_size(memory['total'])} on {plan['device']}: "
        f"weights, gradients and Adam {_size(memory['weights_gradients_moments'])}, {copies}"
        f"activations of {memory['micro_batch_tokens']:,} tokens a side {_size(memory['activations'])}, "
        f"loss {_size(memory['loss'])}",
        f"attention   {_size(attention['weights_of_a_layer'])} a layer if its n x n weights were stored "
        f"(n = {attention['longest']}); {stored}. Decoder cache at most {_size(attention['decoder_cache'])}, "
        "for a batch of short lines that never end"
        + ("; what does not fit is decoded in halves" * (plan["device"] == "cuda")),
    ]
    if "work" in plan:
        work = plan["work"]
        lines.append(
            f"work        {work['flops_a_step'] / 1e12:.3g} TFLOP a step, {work['flops'] / 1e15:.3g} PFLOP in all"
        )
    if "measured" in plan:
        measured = plan["measured"]
        lines.append(
            f"time        {measured['seconds_a_step']:.3g} s a step on {measured['device']}, measured over "
            f"{measured['steps']} steps: {duration(measured['seconds'])} for the training, validation apart"
        )
    if data and data["epochs"] > TOO_MANY_EPOCHS:
        fitting = "cmn, or cmn-small on a CPU" if data["pairs"] < 200_000 else "one with a smaller train.max_steps"
        lines.append(
            f"Too long: {train['max_steps']:,} steps of {train['batch_tokens']:,} tokens are "
            f"{data['epochs']:,.0f} epochs of this corpus; the model overfits long before.  "
            f"A recipe that fits: {fitting}."
        )
    return lines


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


# ── the data at hand ──────────────────────────────────────────────────────────────────────────────────────────────────


def look_at_data(config: Config, raw: Sequence[Path], clean: Path, encode: Path) -> Data:
    """Counted where the data are encoded, else estimated from the clean text, or from the raw files."""
    if (encode / "meta.json").is_file():
        from nmt.data.batching import count_updates
        from nmt.data.dataset import open_dataset

        vocab = _vocab(config, encode)
        train = open_dataset(encode, "train", config.data.src, config.data.tgt)
        src, tgt = train.src.lengths, train.tgt.lengths
        return Data(
            pairs=len(train),
            src_tokens=int(src.sum()),
            tgt_tokens=int(tgt.sum()),
            longest=int(max(src.max(), tgt.max())),
            updates=count_updates(src, tgt, config.train.batch_tokens, config.train.length_buckets, config.train.seed),
            vocab=vocab,
            exact=True,
        )
    texts = [clean / f"train.{language}" for language in (config.data.src, config.data.tgt)]
    if all(text.is_file() for text in texts):
        pairs, sizes = _lines(texts[0]), [text.stat().st_size for text in texts]
    else:
        pairs, sizes = _raw(raw)
        if config.data.src != config.clean.columns[0]:
            sizes.reverse()
    tokens = [max(1, round(size / BYTES_A_TOKEN)) + pairs for size in sizes]
    return Data(
        pairs=pairs,
        src_tokens=tokens[0],
        tgt_tokens=tokens[1],
        longest=config.encode.max_tokens,
        updates=max(1, math.ceil(max(tokens) / config.train.batch_tokens)),
        vocab=(config.bpe.vocab_size, config.bpe.vocab_size),
        exact=False,
    )


def cpu_warning(config: Config, encode: Path, device: str) -> str | None:
    """What to say before a training that will take long on this CPU, from the counts of the encoded data alone."""
    if not is_cpu(device):
        return None
    # Read as it is: nothing here may load torch, since this may be the process that starts the others.
    meta = read_json(encode / "meta.json")
    try:
        vocab = dict(zip(meta["languages"], meta["vocab_size"], strict=True))
        counts, languages = meta["splits"]["train"], (config.data.src, config.data.tgt)
        src_tokens, tgt_tokens = (int(counts[f"{language}_tokens"]) for language in languages)
        pairs, sizes = int(counts["pairs"]), (int(vocab[config.data.src]), int(vocab[config.data.tgt]))
    except (KeyError, TypeError, ValueError):
        return None  # What is wrong with the data the training says.
    updates = max(1, math.ceil(max(src_tokens, tgt_tokens) / config.train.batch_tokens))
    data = Data(pairs=max(1, pairs), src_tokens=src_tokens, tgt_tokens=tgt_tokens, longest=config.encode.max_tokens,
                updates=updates, vocab=sizes, exact=False)  # fmt: skip
    hours = make_plan(config, data)["work"]["flops"] / (cores() * CORE_FLOPS) / 3600
    if hours < LONG_HOURS:
        return None
    epochs = config.train.max_steps / updates
    return (
        f"{config.train.max_steps:,} steps ({epochs:,.0f} epochs) will take about {hours:,.0f} hours on the {cores()} "
        "cores of this CPU; a GPU, a smaller recipe or fewer steps (train.max_steps) take less, and nmt plan --measure "
        "times it"
    )


def _vocab(config: Config, encode: Path) -> tuple[int, int]:
    from nmt.data.dataset import read_meta

    meta = read_meta(encode)
    sizes = dict(zip(meta["languages"], meta["vocab_size"], strict=True))
    return sizes[config.data.src], sizes[config.data.tgt]


def _lines(path: Path) -> int:
    with path.open("rb") as stream:
        return max(1, sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 20), b"")))


def _raw(files: Sequence[Path]) -> tuple[int, list[int]]:
    """Pairs, and bytes of each side, of raw files, tab-separated or line-aligned."""
    pairs, sizes = 0, [0, 0]
    for number, path in enumerate(files):
        with path.open("rb") as stream:
            for row in stream:
                columns = row.rstrip(b"\r\n").split(b"\t")
                if len(columns) > 1:
                    pairs += 1
                    sizes = [size + len(column) for size, column in zip(sizes, columns, strict=False)]
                else:
                    pairs += number % 2
                    sizes[number % 2] += len(row)
    return max(1, pairs), sizes


def measure(config: Config, encode: Path, device: str, steps: int = 5) -> dict[str, Any]:
    """Take a few real steps with a new model, the first untimed, and work out the whole; nothing is saved."""
    from nmt.data.batching import plan_epoch
    from nmt.data.dataset import open_dataset
    from nmt.distributed.world import World, choose_device
    from nmt.training.memory import probe_memory
    from nmt.training.step import Trainer, prepare, train_step

    data = open_dataset(encode, "train", config.data.src, config.data.tgt)
    world = World(0, 1, choose_device(device))
    train, lengths = config.train, (data.src.lengths, data.tgt.lengths)
    updates = next(plan_epoch(*lengths, train.batch_tokens, train.length_buckets, train.seed, 0))
    trainer = probe_memory(Trainer.build(config, world, _vocab(config, encode)), data)
    chosen = updates[: steps + 1]
    begun = time.perf_counter()
    for step, update in enumerate(chosen, 1):
        stats = train_step(trainer, prepare(trainer, data, update), step)
        float(stats.loss)  # Waits for the device.
        if step == 1 and len(chosen) > 1:
            begun = time.perf_counter()
    timed = max(1, len(chosen) - 1)
    seconds = (time.perf_counter() - begun) / timed
    return {
        "device": str(world.device),
        "steps": timed,
        "seconds_a_step": seconds,
        "seconds": seconds * config.train.max_steps,
    }
