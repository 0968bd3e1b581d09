"""How large a model is and how much work a training of it: formulas of the settings alone."""

import re
from typing import Any

from nmt.config import ModelConfig

PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "V100-SXM2": 125e12,
    "V100-PCIE": 112e12,
    "T4": 65e12,
}
"""Dense operations a second of a GPU in float16 and, where it has that, in bfloat16, by words of its name, from its
maker's data sheets; the first that fits counts."""

NO_BFLOAT16 = {"V100-SXM2", "V100-PCIE", "T4"}

PARTS = ("MIG", "Laptop", "Max-Q", "4090 D")
"""Words in the name of a GPU that has less than the one that it is called after."""


def parameters(model: ModelConfig, tgt_vocab: int, src_vocab: int | None = None) -> dict[str, int]:
    """Weights by part. One embedding serves both languages and the output, unless the source has its own."""
    width, inner = model.d_model, model.d_ff
    kv_width = (model.kv_heads or model.heads) * width // model.heads
    norm = width * (2 if model.norm_type == "layer" else 1)
    attention = 2 * (width * width + width) + 2 * (width * kv_width + kv_width)
    gates = 2 if model.activation == "swiglu" else 1
    feed_forward = gates * (width * inner + inner) + inner * width + width
    final_norm = norm if model.norm_order == "pre" else 0
    decoder_layers = model.decoder_layers or model.layers
    return {
        "embedding": (tgt_vocab + (src_vocab or 0)) * width,
        "positions": model.max_positions * width if model.position == "learned" else 0,
        "encoder": model.layers * (attention + feed_forward + 2 * norm) + final_norm,
        "decoder": decoder_layers * (2 * attention + feed_forward + 3 * norm) + final_norm,
    }


def training_flops(model: ModelConfig, vocab: int, src: Any, tgt: Any) -> Any:
    """Operations of one pair of so many tokens (numbers, or arrays of many pairs), forward and backward (3 x forward).

    Matrix products only, two operations a multiply-add; the embedding is a look-up, the output projection counts.
    """
    width, inner = model.d_model, model.d_ff * (1.5 if model.activation == "swiglu" else 1)
    kv_width = (model.kv_heads or model.heads) * width // model.heads
    ask, answer, feed = 2 * width * width, 2 * width * kv_width, 2 * width * inner
    encoder = model.layers * (src * (ask + answer + feed) + 2 * src * src * width)
    decoder = (model.decoder_layers or model.layers) * (
        tgt * (2 * ask + answer + feed) + src * answer + 2 * tgt * (src + tgt) * width
    )
    # Half of a causal attention's products are hidden ones.
    decoder -= (model.decoder_layers or model.layers) * tgt * tgt * width
    return 3 * 2 * (encoder + decoder + tgt * width * vocab)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Operations a second that a GPU can do at most, where that is known."""

    def has(words: str) -> bool:
        return re.search(rf"\b{words}\b", device_name) is not None

    known = next((name for name in PEAKS if has(name)), None)
    if known is None or any(map(has, PARTS)) or precision == "float32":
        return None
    return None if precision == "bfloat16" and known in NO_BFLOAT16 else PEAKS[known]
