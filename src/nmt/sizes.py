"""How large a model is and how much work a training of it: formulas of the settings alone."""

from typing import Any

from nmt.config import ModelConfig

PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
}
"""Dense bfloat16 operations a second of a GPU, by a part of its name, from its maker's data sheet."""


def parameters(model: ModelConfig, tgt_vocab: int, src_vocab: int | None = None) -> dict[str, int]:
    """Weights by part. One embedding serves both languages and the output, unless the source has its own."""
    width, inner = model.d_model, model.d_ff
    kv_width = (model.kv_heads or model.heads) * width // model.heads
    norm = width * (2 if model.norm_kind == "layer" else 1)
    attention = 2 * (width * width + width) + 2 * (width * kv_width + kv_width)
    gates = 2 if model.activation == "swiglu" else 1
    feed_forward = gates * (width * inner + inner) + inner * width + width
    final_norm = norm if model.norm == "pre" else 0
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
    known = [peak for name, peak in PEAKS.items() if name in device_name]
    return known[0] if known and precision == "bfloat16" else None
