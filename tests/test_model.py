"""The Transformer against the paper, torch's own layers, hand-worked numbers, and its slower self."""

import math
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nmt.config import ModelConfig
from nmt.model.cached_decoder import CachedDecoder
from nmt.model.dropout import Dropout, keep_mask
from nmt.model.positions import ROWS, Rotation, angles, apply_rope, sinusoids
from nmt.model.transformer import Attention, FeedForward, Transformer, attention_bias, attention_weights
from nmt.special_tokens import BOS, EOS, PAD

SMALL = {"layers": 2, "d_model": 32, "d_ff": 48, "heads": 4}
VARIANTS = [
    {},
    {"norm_order": "pre"},
    {"norm_type": "rms", "activation": "swiglu", "position": "rope", "norm_order": "pre"},
    {"activation": "gelu", "position": "learned"},
    {"kv_heads": 2, "decoder_layers": 1},
    {"kv_heads": 1, "position": "rope", "layers": 1, "decoder_layers": 3},
]


def make(vocab: int = 50, src_vocab: int | None = None, **changes) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(**(SMALL | changes)), vocab, src_vocab).double().eval()


def sources(*lengths: int, width: int | None = None, seed: int = 0) -> torch.Tensor:
    """Sources of these lengths that end with eos, padded to the longest or to `width`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), width or max(lengths)), PAD)
    for row, length in enumerate(lengths):
        ids[row, : length - 1] = torch.randint(4, 50, (length - 1,), generator=generator)
        ids[row, length - 1] = EOS
    return ids


def targets(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    ids = torch.randint(4, 50, (rows, length), generator=torch.Generator().manual_seed(seed))
    ids[:, 0] = BOS
    return ids


def test_the_hand_worked_attention_example_comes_out():
    key = torch.tensor([[1, 0], [0, 1], [0.7, 0.7], [1, 0]])[None, None]
    value = torch.tensor([[2.0, 1], [0, 3], [1, 2], [0, 0]])[None, None]
    query = torch.tensor([[1.0, 0]])[None, None]
    # By hand: scores 1, 0, .7, 1 over sqrt(2); their exponentials 2.028, 1, 1.640, 2.028, and the sum 6.697.
    weights = attention_weights(query, key, causal=False)
    assert weights.flatten().tolist() == pytest.approx([0.303, 0.149, 0.245, 0.303], abs=5e-4)
    assert (weights @ value).flatten().tolist() == pytest.approx([0.851, 1.241], abs=0.0006)
    assert torch.allclose(weights @ value, F.scaled_dot_product_attention(query, key, value), atol=1e-6)


def test_sinusoids_are_those_of_the_paper():
    assert sinusoids(2, 4)[0].tolist() == [0, 1, 0, 1]
    assert sinusoids(2, 4)[1].tolist() == pytest.approx([0.841, 0.540, 0.010, 1.000], abs=5e-4)
    table = sinusoids(300, 64)
    for position, channel in product((0, 1, 7, 299), (0, 5, 31)):
        angle = position / 10_000 ** (2 * channel / 64)
        expected = [math.sin(angle), math.cos(angle)]
        assert table[position, 2 * channel : 2 * channel + 2].tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.allclose(table.norm(dim=1), torch.tensor(math.sqrt(64 / 2)).expand(300))


def test_a_shift_of_position_is_one_rotation_wherever_it_happens():
    table, shift = sinusoids(50, 8).double(), 5
    turn = torch.zeros(8, 8, dtype=torch.float64)
    for i, angle in enumerate(angles(shift + 1, 8)[shift]):
        c, s = angle.cos(), angle.sin()
        turn[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor([[c, s], [-s, c]])
    assert torch.allclose(table[:-shift] @ turn.T, table[shift:], atol=1e-6)


def test_rotated_queries_and_keys_see_their_distance_alone():
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angle = angles(40, 8)

    def turned(x, at):
        return apply_rope(x, Rotation(angle[at : at + 1].cos(), angle[at : at + 1].sin()))

    scores = [(turned(query, at + 3) @ turned(key, at).transpose(2, 3)).item() for at in (0, 1, 30)]
    assert scores == pytest.approx([scores[0]] * 3)
    assert torch.allclose(turned(query, 9).norm(), query.norm())


def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.kv_proj.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.q_proj.bias, ours.kv_proj.bias]))
        theirs.out_proj.weight.copy_(ours.out_proj.weight)
        theirs.out_proj.bias.copy_(ours.out_proj.bias)


def copy_block(ours, theirs) -> None:
    copy_attention(ours.attention, theirs.self_attn)
    if hasattr(theirs, "multihead_attn"):
        copy_attention(ours.cross_attention, theirs.multihead_attn)
    theirs.linear1.load_state_dict(ours.feed_forward.fc1.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.fc2.state_dict())
    for number, residual in enumerate(ours.sublayers, 1):
        getattr(theirs, f"norm{number}").load_state_dict(residual.norm.state_dict())


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_layers_equal_those_of_torch_with_the_same_weights(norm, activation):
    model = make(norm_order=norm, activation=activation)
    for parameter in model.parameters():  # Norms and biases of one and zero would hide a mistake.
        parameter.data += 0.1 * torch.randn_like(parameter)
    shape = {"d_model": 32, "nhead": 4, "dim_feedforward": 48, "dropout": 0.0, "activation": activation}
    shape |= {"batch_first": True, "norm_first": norm == "pre"}
    src, tgt = sources(7, 4), targets(2, 5)
    memory, mask = model.encode(src)
    hidden = model.decode(tgt, memory, mask)

    x = model.embed(src, model.embedding)
    for layer in model.encoder:
        theirs = nn.TransformerEncoderLayer(**shape).double().eval()
        copy_block(layer, theirs)
        x = theirs(x, src_key_padding_mask=src == PAD)
    x = model.encoder_norm(x)
    real = src != PAD
    assert torch.allclose(memory[real], x[real], atol=1e-10)
    y = model.embed(tgt, model.embedding)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for layer in model.decoder_layers:
        theirs = nn.TransformerDecoderLayer(**shape).double().eval()
        copy_block(layer, theirs)
        y = theirs(y, x, tgt_mask=causal, memory_key_padding_mask=src == PAD)
    assert torch.allclose(hidden, model.decoder_norm(y), atol=1e-10)


def test_shared_key_value_heads_equal_full_attention_with_repeated_weights():
    config = ModelConfig(**SMALL, kv_heads=2)
    grouped = Attention(config).double().eval()
    full = Attention(ModelConfig(**SMALL)).double().eval()
    with torch.no_grad():
        for name in ("q_proj", "out_proj"):
            getattr(full, name).load_state_dict(getattr(grouped, name).state_dict())
        for kind in ("weight", "bias"):
            halves = getattr(grouped.kv_proj, kind).unflatten(0, (2, 2, 8))
            getattr(full.kv_proj, kind).copy_(halves.repeat_interleave(2, 1).flatten(0, 2))
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    some = attention_bias(torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]]).bool(), torch.float64)
    each = attention_bias(torch.rand(2, 1, 5, 5) < 0.5, torch.float64)
    each[..., 0] = 0
    for how in ({}, {"causal": True}, {"bias": some[:, None, None]}, {"bias": each}):
        assert torch.allclose(grouped(x, grouped.keys_values(x), **how), full(x, full.keys_values(x), **how))
        maps: list[torch.Tensor] = []
        shown = grouped(x, grouped.keys_values(x), attn_weights=maps, **how)
        assert torch.allclose(grouped(x, grouped.keys_values(x), **how), shown)


def test_rms_norm_and_swiglu_are_their_formulas():
    config = ModelConfig(**SMALL, activation="swiglu", norm_type="rms")
    block = FeedForward(config).double().eval()
    x = torch.randn(1, 3, 32, dtype=torch.float64)
    inner = x @ block.fc1.weight.T + block.fc1.bias
    gate, up = inner[..., :48], inner[..., 48:]
    expected = (gate / (1 + torch.exp(-gate)) * up) @ block.fc2.weight.T + block.fc2.bias
    assert torch.allclose(block(x), expected)
    norm = make(norm_type="rms").encoder[0].sublayers[0].norm
    assert torch.allclose(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())


@pytest.mark.parametrize("changes", VARIANTS)
def test_a_later_token_changes_nothing_before_it(changes):
    model, src = make(**changes), sources(6, 3)
    tgt = targets(2, 8)
    changed = tgt.clone()
    changed[:, 5:] = 9
    before, after = model(src, tgt), model(src, changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-12)
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("changes", VARIANTS)
def test_more_padding_of_the_source_changes_nothing(changes):
    model, tgt = make(**changes), targets(2, 5)
    narrow, wide = sources(6, 3), sources(6, 3, width=11)
    assert torch.allclose(model(narrow, tgt), model(wide, tgt), atol=1e-12)
    alone = model(narrow[1:, :3], tgt[1:])
    assert torch.allclose(model(narrow, tgt)[1:], alone, atol=1e-12)


def test_without_positions_the_encoder_is_equivariant_to_permutation():
    model = make()
    model.positions.table.zero_()
    src = sources(7)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    memory, _ = model.encode(src)
    permuted, _ = model.encode(src[:, order])
    assert torch.allclose(memory[:, order], permuted, atol=1e-12)
    assert not torch.allclose(make().encode(src)[0][:, order], make().encode(src[:, order])[0])


@pytest.mark.parametrize("changes", VARIANTS)
def test_decoding_with_a_cache_equals_decoding_without(changes):
    model = make(**changes)
    beam, src = 3, sources(6, 3, 4)
    tgt = targets(9, 7)
    decoder = CachedDecoder.of(model, src, beam)
    whole = model.logits(model(src.repeat_interleave(beam, 0), tgt))
    for position in range(4):
        assert torch.allclose(decoder.step(tgt[:, position]), whole[:, position], atol=1e-12)
    # Rows are reordered inside their sentences, and the sentence in the middle leaves.
    rows = torch.tensor([2, 0, 0, 8, 7, 6])
    decoder.select(rows)
    tgt = torch.cat([tgt[rows, :4], targets(6, 3, seed=3)], 1)
    whole = model.logits(model(src[[0, 2]].repeat_interleave(beam, 0), tgt))
    for position in range(4, 7):
        assert torch.allclose(decoder.step(tgt[:, position]), whole[:, position], atol=1e-12)


@pytest.mark.parametrize("changes", VARIANTS)
def test_attention_maps_are_the_weights_that_the_fast_path_uses(changes):
    model, src, tgt = make(**changes), sources(6, 3), targets(2, 5)
    maps: list[torch.Tensor] = []
    memory, mask = model.encode(src, maps)
    assert torch.allclose(memory, model.encode(src)[0], atol=1e-12)
    assert torch.allclose(model.decode(tgt, memory, mask, maps), model(src, tgt), atol=1e-12)
    found = model.attention_maps(src, tgt)
    depth = model.config.decoder_layers or model.config.layers
    assert [len(found[kind]) for kind in ("encoder", "decoder", "cross")] == [model.config.layers, depth, depth]
    for weights in (*found["encoder"], *found["decoder"], *found["cross"]):
        assert torch.allclose(weights.sum(-1), torch.ones((), dtype=torch.float64))
    assert found["cross"][0].shape == (2, 4, 5, 6)
    assert (found["cross"][0][1, :, :, 3:] == 0).all()
    assert (found["decoder"][0].triu(1) == 0).all()


def test_all_embeddings_are_one_matrix_unless_vocabularies_differ():
    model = make()
    assert len({p.data_ptr() for n, p in model.named_parameters() if "embedding" in n}) == 1
    hidden = torch.randn(1, 2, 32, dtype=torch.float64)
    assert torch.equal(model.logits(hidden), hidden @ model.embedding.weight.T)
    two = make(vocab=50, src_vocab=60)
    assert two.src_embedding.weight.shape == (60, 32)
    assert two.logits(hidden).shape == (1, 2, 50)


@pytest.mark.parametrize(
    ("shape", "vocab", "millions"),
    [({}, 37_000, 63.1), ({}, 8000, 48.2), ({"d_model": 1024, "d_ff": 4096, "heads": 16}, 37_000, 214.2),
     ({"d_model": 1024, "d_ff": 4096, "heads": 16}, 8000, 184.5)],
)  # fmt: skip
def test_base_and_big_have_the_parameters_of_the_paper(shape, vocab, millions):
    with torch.device("meta"):
        model = Transformer(ModelConfig(**shape), vocab)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)
    layer = model.encoder[0]
    share = sum(p.numel() for p in layer.feed_forward.parameters()) / sum(p.numel() for p in layer.parameters())
    assert share == pytest.approx(2 / 3, abs=0.01)


def test_every_matrix_begins_as_documented():
    torch.manual_seed(1)
    model = Transformer(ModelConfig(d_model=128, d_ff=512, heads=4, layers=1, activation="swiglu"), 1000)
    layer = model.decoder_layers[0]
    attention, feed_forward = layer.cross_attention, layer.feed_forward
    xavier = math.sqrt(6 / (128 + 128))
    bounds = [
        *((part, xavier / math.sqrt(2)) for part in (attention.q_proj.weight, *attention.kv_proj.weight.chunk(2))),
        (attention.out_proj.weight, xavier),
        *((part, 1 / math.sqrt(128)) for part in feed_forward.fc1.weight.chunk(2)),
        (feed_forward.fc2.weight, 1 / math.sqrt(512)),
    ]
    for weight, bound in bounds:
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert model.embedding.weight.std().item() == pytest.approx(128**-0.5, rel=0.02)
    assert all((p == 0).all() for n, p in model.named_parameters() if n.endswith("bias"))


def test_dropout_zeroes_its_share_and_keeps_the_mean():
    torch.manual_seed(0)
    for p in (0.1, 0.3):
        mask = keep_mask(torch.ones(1_000_003), p)
        assert (mask == 0).float().mean().item() == pytest.approx(p, abs=0.002)
        assert mask.double().mean().item() == pytest.approx(1, abs=0.003)
        assert len(mask.unique()) == 2
    x = torch.randn(100, 100, requires_grad=True)
    dropout = Dropout(0.5)
    y = dropout(x)
    y.sum().backward()
    assert torch.equal(y, x * x.grad)
    assert dropout.eval()(x) is x


def test_learned_positions_end_where_the_setting_says():
    model = make(position="learned", max_positions=6)
    with pytest.raises(ValueError, match="max_positions"):
        model.encode(sources(7))


@pytest.mark.parametrize("kind", ["sinusoidal", "rope"])
def test_a_text_longer_than_the_table_of_positions_makes_a_larger_one(kind, monkeypatch):
    grows, src = make(position=kind), sources(ROWS + 300)
    monkeypatch.setattr("nmt.model.positions.ROWS", ROWS + 300)
    assert torch.equal(grows.encode(src)[0], make(position=kind).encode(src)[0])


class Operations(TorchDispatchMode):
    """What torch is asked to do: each operation's name, its arguments and what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[str, tuple, object]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.done.append((func.__name__, args, result))
        return result

    def sizes(self) -> list[int]:
        """The numbers that each tensor made has, views left out."""
        made = (result for _, _, result in self.done if isinstance(result, torch.Tensor))
        return [tensor.numel() for tensor in made if not tensor._is_view()]


def test_a_bias_is_made_once_for_all_layers():
    def conversions(layers: int) -> int:
        model, src, tgt = make(layers=layers), sources(6, 3), targets(2, 5)
        decoder = CachedDecoder.of(model, src, beam=3)
        with Operations() as seen, torch.no_grad():
            model(src, tgt)
            decoder.step(tgt[:, :1].repeat(1, 3).flatten())
        return sum(any(isinstance(arg, torch.Tensor) and arg.dtype == torch.bool for arg in args)
                   for _, args, _ in seen.done)  # fmt: skip

    assert conversions(1) == conversions(4)


def test_shared_keys_and_values_are_not_copied_for_each_head():
    model, src = make(kv_heads=1, layers=1), sources(200, 150)
    decoder = CachedDecoder.of(model, src, beam=2)
    for at in range(3):
        with Operations() as seen:
            decoder.step(torch.full((4,), 7 + at))
        # Of all heads the keys of the sources would be 2 x 4 x 200 x 8 numbers.
        assert max(seen.sizes()) < 2 * 4 * 200 * 8
