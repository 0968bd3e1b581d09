"""A run's final model in CTranslate2's format, to time it and to check translations against it.

    python scripts/to_ctranslate2.py runs/NAME FOLDER

Needs ctranslate2, safetensors, sentencepiece and numpy, but neither nmt nor torch. Takes what the paper's recipes are
made of: LayerNorm, sinusoidal positions, ReLU or GELU, as many key-value heads as heads, one joint vocabulary.
"""

import json
import sys
from pathlib import Path

import ctranslate2
import sentencepiece
from ctranslate2.specs import Activation, TransformerSpec
from safetensors.numpy import load_file

ACTIVATIONS = {"relu": Activation.RELU, "gelu": Activation.GELU}


def convert(run: Path, out: Path) -> None:
    """Write `out`, replacing what is there."""
    settings = json.loads((run / "config.json").read_text(encoding="utf-8"))
    model = settings["model"]
    plain = {"norm_type": ("layer",), "position": ("sinusoidal",), "kv_heads": (0, model["heads"])}
    plain["activation"] = tuple(ACTIVATIONS)
    for name, allowed in plain.items():
        if model[name] not in allowed:
            sys.exit(
                f"{run}: model.{name} is {model[name]}; from here CTranslate2 gets only {', '.join(map(str, allowed))}."
            )
    if not settings["bpe"]["shared_vocab"]:
        sys.exit(f"{run}: bpe.shared_vocab is false; from here CTranslate2 gets only a joint vocabulary.")
    weights = load_file(run / "final" / "model.safetensors")
    depths = (model["layers"], model["decoder_layers"] or model["layers"])
    pre = model["norm_order"] == "pre"
    spec = TransformerSpec.from_config(
        depths, model["heads"], pre_norm=pre, no_final_norm=not pre, activation=ACTIVATIONS[model["activation"]]
    )

    def linear(place, *names):
        place.weight = _stack([weights[f"{name}.weight"] for name in names])
        place.bias = _stack([weights[f"{name}.bias"] for name in names])

    def norm(place, name):
        place.gamma, place.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]

    def attention(place, name, norm_name, crossing=False):
        if crossing:
            linear(place.linear[0], f"{name}.q_proj")
            linear(place.linear[1], f"{name}.kv_proj")
        else:
            linear(place.linear[0], f"{name}.q_proj", f"{name}.kv_proj")
        linear(place.linear[-1], f"{name}.out_proj")
        norm(place.layer_norm, norm_name)

    # Our sinusoids are interleaved and begin at position 0, CTranslate2's own are neither.
    positions = _sinusoids(model["max_positions"], model["d_model"])
    for side, layers, embeddings in (
        (spec.encoder, "encoder", spec.encoder.embeddings[0]),
        (spec.decoder, "decoder_layers", spec.decoder.embeddings),
    ):
        embeddings.weight = weights["embedding.weight"]
        side.scale_embeddings = True
        side.position_encodings.encodings = positions
        if pre:
            norm(side.layer_norm, "encoder_norm" if layers == "encoder" else "decoder_norm")
        for number, layer in enumerate(side.layer):
            here = f"{layers}.{number}"
            attention(layer.self_attention, f"{here}.attention", f"{here}.sublayers.0.norm")
            if layers == "decoder_layers":
                attention(layer.attention, f"{here}.cross_attention", f"{here}.sublayers.1.norm", crossing=True)
            linear(layer.ffn.linear_0, f"{here}.feed_forward.fc1")
            linear(layer.ffn.linear_1, f"{here}.feed_forward.fc2")
            norm(layer.ffn.layer_norm, f"{here}.sublayers.{2 if layers == 'decoder_layers' else 1}.norm")
    spec.decoder.projection.weight = weights["embedding.weight"]
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(run / "tokenizer" / "joint.model"))
    vocabulary = [pieces.id_to_piece(number) for number in range(pieces.get_piece_size())]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = (
        pieces.id_to_piece(number) for number in (pieces.bos_id(), pieces.eos_id(), pieces.unk_id())
    )
    spec.config.decoder_start_token = spec.config.bos_token
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = model["norm_eps"]
    spec.validate()
    out.mkdir(parents=True, exist_ok=True)
    spec.save(str(out))


def _stack(arrays):
    import numpy as np

    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _sinusoids(positions, width):
    import numpy as np

    angle = np.arange(positions)[:, None] / 10_000.0 ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angle), np.cos(angle)], axis=2).reshape(positions, width).astype(np.float32)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(f"ctranslate2 {ctranslate2.__version__}", file=sys.stderr)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
