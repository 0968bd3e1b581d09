"""What the word `auto` means: settings whose good value depends on the device, as pure functions of numbers.

A GPU is handed in as what decides (`Gpu`), any other device as None; so `nmt plan` can speak of a GPU that is not here.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from nmt.config import Config, ModelConfig, Precision, TranslateConfig

Auto = Literal["auto"]

CPU_DEVICE_TOKENS = 4096
"""Of a micro-batch where no GPU is: products of this size are at full speed, and base takes 2.5 GiB with it."""

PADDED = 1.25
"""Room for padding in the share that a process has of an update, so that one micro-batch can hold all of it."""

CPU_TRANSLATE_TOKENS = 4096
"""Of a batch that is translated where no GPU is: twice and four times as many were not faster (docs/performance.md)."""

GPU_TRANSLATE_TOKENS = 2**18
"""The most on a GPU: beyond, a window of 10,000 lines would be too few batches to be sorted by length."""

TYPICAL = 25
"""Source tokens of an everyday sentence; the paper's newspaper sentences have 27."""


@dataclass(frozen=True)
class Gpu:
    """What of a CUDA device decides its defaults."""

    memory: int
    """Bytes, free or not."""
    bfloat16: bool
    """Whether it multiplies bfloat16 itself (from NVIDIA's Ampere on)."""


ASSUMED = Gpu(80 * 2**30, bfloat16=True)
"""What is planned for where a GPU is named that is not here: an A100 or H100."""


def precision(setting: Precision, gpu: Gpu | None) -> Precision:
    """`train.precision` on a device: bfloat16 on a GPU that multiplies it; float32 elsewhere, on every CPU."""
    if setting != "auto":
        return setting
    return "bfloat16" if gpu is not None and gpu.bfloat16 else "float32"


def device_tokens(setting: int | Auto, batch_tokens: int, processes: int, gpu: Gpu | None) -> int:
    """`runtime.device_tokens` on a device: on a GPU all that a process has of an update, which is tried for its memory.

    Elsewhere a fixed number; nothing is tried there, since a system short of memory ends a process without asking.
    """
    if setting != "auto":
        return setting
    return CPU_DEVICE_TOKENS if gpu is None else max(1, math.ceil(PADDED * batch_tokens / processes))


def translate_tokens(translate: TranslateConfig, model: ModelConfig, size: int, gpu: Gpu | None) -> int:
    """`translate.batch_tokens` on a device; numbers of the decoder's cache have `size` bytes.

    On a GPU the largest power of two with which the cache takes at most a quarter of the memory if all sentences are
    TYPICAL and use all the room that they are given: a power of two of tokens for each row, and half as much again
    while it is being doubled. Sentences that need more than there is are translated in halves.
    """
    if translate.batch_tokens != "auto":
        return translate.batch_tokens
    if gpu is None:
        return CPU_TRANSLATE_TOKENS
    room = 1 << max(4, (TYPICAL + translate.max_length_offset - 1).bit_length())
    a_token = 2 * (model.kv_heads or model.heads) * model.d_model // model.heads * size
    a_row = 1.5 * (model.decoder_layers or model.layers) * room * a_token
    fits = int(TYPICAL * gpu.memory / 4 / a_row)
    return min(GPU_TRANSLATE_TOKENS, max(CPU_TRANSLATE_TOKENS, 1 << max(0, fits.bit_length() - 1)))


def for_training(config: Config, gpu: Gpu | None) -> Config:
    """The settings of a training with what `auto` means on its device in place of the word.

    `runtime.device_tokens` stays `auto` on a GPU alone, where it is found by trying.
    """
    tokens = config.runtime.device_tokens
    return replace(
        config,
        train=replace(config.train, precision=precision(config.train.precision, gpu)),
        runtime=replace(
            config.runtime, device_tokens=CPU_DEVICE_TOKENS if tokens == "auto" and gpu is None else tokens
        ),
    )
