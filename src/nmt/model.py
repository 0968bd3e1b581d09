"""The Transformer of Vaswani et al. 2017, "Attention Is All You Need", whole, and its modern variants.

A tensor's name ends in its shape: B sentences, S source tokens, T target tokens, D model width, H heads, G key-value
heads, K width of a head, F inner width, V vocabulary, R beam rows. A mask is boolean, and True means "may be looked
at". Read from the top: positions, attention, feed-forward, residual, layers, Transformer, cached decoder.
"""

import itertools
import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.config import ModelConfig
from nmt.symbols import PAD

# ── positions ───────────────────────────────────────────────────────────────────────────────────────────────────────


def angles(positions: int, width: int) -> Tensor:
    """pos / 10000^(2i/width), one row for each position, one column for each of the width / 2 frequencies.

    Vaswani et al. 2017, section 3.5. Worked out in float64: at position 1000 float32 has lost four digits.
    """
    frequency = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))
    return torch.arange(positions, dtype=torch.float64)[:, None] * frequency


def sinusoids(positions: int, width: int) -> Tensor:
    """PE(pos, 2i) = sin, PE(pos, 2i+1) = cos of the same angle, from position 0 (Vaswani et al. 2017, section 3.5)."""
    angle = angles(positions, width)
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1).float()


def rotate(x_BHTK: Tensor, angle_TK: Tensor) -> Tensor:
    """Turn each pair of channels (2i, 2i+1) by the angle of its position (RoPE, Su et al. 2021, equation 34).

    The product of a query and a key then depends on the distance of their positions alone.
    """
    cos_TK, sin_TK = angle_TK.cos().to(x_BHTK.dtype), angle_TK.sin().to(x_BHTK.dtype)
    even, odd = x_BHTK[..., 0::2], x_BHTK[..., 1::2]
    return torch.stack([even * cos_TK - odd * sin_TK, even * sin_TK + odd * cos_TK], dim=-1).flatten(-2)


# ── dropout ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def keep_mask(x: Tensor, p: float) -> Tensor:
    """0 with probability p, else 1 / (1 - p), for each number of `x`, from 16 random bits each.

    On a CPU drawing the mask is what dropout costs; this takes a third of the time of `bernoulli_`. The probability
    is rounded to 1/65536, and the scale is that of the rounded one, so that the mean stays exact.
    """
    threshold = round(p * 65536)
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    keep = bits.view(torch.int16)[: x.numel()] >= threshold - 32768
    return keep.view(x.shape).to(x.dtype).mul_(65536 / (65536 - threshold))


class Dropout(nn.Module):
    """Zero each number with probability p and scale the others by 1 / (1 - p), while training."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if x.device.type == "cpu":
            return x * keep_mask(x, self.p)
        return F.dropout(x, self.p)


# ── attention and feed-forward ──────────────────────────────────────────────────────────────────────────────────────


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2): softmax(Q K^T / sqrt(K)) V for each head.

    Keys and values are made apart from the answer, so that a decoder can keep them. With fewer key-value heads than
    heads, each is shared by heads / kv_heads queries (Ainslie et al. 2023).
    """

    def __init__(self, config: ModelConfig, *, rotary: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.width = config.d_model // config.heads
        self.rotary = rotary
        self.dropout = config.attention_dropout
        self.query = nn.Linear(config.d_model, config.d_model)
        self.key_value = nn.Linear(config.d_model, 2 * self.kv_heads * self.width)
        self.output = nn.Linear(config.d_model, config.d_model)
        self.angle: Tensor
        self.register_buffer("angle", angles(512, self.width).float() if rotary else None, persistent=False)

    def _split(self, x_BTD: Tensor, heads: int) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:2], heads, self.width).transpose(1, 2)

    def _turn(self, x_BHTK: Tensor, at: int | None) -> Tensor:
        if not self.rotary:
            return x_BHTK
        start, end = (0, x_BHTK.shape[2]) if at is None else (at, at + 1)
        if end > len(self.angle):
            self.angle = angles(2 * end, self.width).to(self.angle)
        return rotate(x_BHTK, self.angle[start:end])

    def keys_values(self, memory_BSD: Tensor, at: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values, both [B, G, S, K], of tokens at the positions from 0 on, or all of them at position `at`."""
        key_BSD, value_BSD = self.key_value(memory_BSD).chunk(2, dim=2)
        return self._turn(self._split(key_BSD, self.kv_heads), at), self._split(value_BSD, self.kv_heads)

    def forward(
        self,
        x_BTD: Tensor,
        keys_values: tuple[Tensor, Tensor],
        mask_B11S: Tensor | None = None,
        *,
        causal: bool = False,
        at: int | None = None,
        maps: list[Tensor] | None = None,
    ) -> Tensor:
        """What each token of x finds; with `maps` the weights [B, H, T, S] are worked out visibly and appended."""
        query_BHTK = self._turn(self._split(self.query(x_BTD), self.heads), at)
        key_BHSK, value_BHSK = keys_values
        if self.kv_heads != self.heads:
            key_BHSK, value_BHSK = (kv.repeat_interleave(self.heads // self.kv_heads, 1) for kv in keys_values)
        if maps is None:
            dropout = self.dropout if self.training else 0.0
            # A decoder may keep its keys more exactly than it asks.
            found_BHTK = F.scaled_dot_product_attention(
                query_BHTK.to(key_BHSK.dtype), key_BHSK, value_BHSK, mask_B11S, dropout_p=dropout, is_causal=causal
            ).to(query_BHTK.dtype)
        else:
            weights_BHTS = attention_weights(query_BHTK, key_BHSK, mask_B11S, causal=causal)
            maps.append(weights_BHTS)
            found_BHTK = weights_BHTS @ value_BHSK
        return cast(Tensor, self.output(found_BHTK.transpose(1, 2).flatten(2)))


def attention_weights(query_BHTK: Tensor, key_BHSK: Tensor, mask: Tensor | None = None, *, causal: bool) -> Tensor:
    """softmax(Q K^T / sqrt(K)) as [B, H, T, S]: row t says how much token t looks at each token s (equation 1)."""
    score_BHTS = query_BHTK @ key_BHSK.transpose(2, 3) / math.sqrt(query_BHTK.shape[-1])
    if causal:
        mask = torch.ones(score_BHTS.shape[-2:], dtype=torch.bool, device=score_BHTS.device).tril()
    if mask is not None:
        score_BHTS = score_BHTS.masked_fill(~mask, -math.inf)
    return score_BHTS.softmax(dim=-1)


class FeedForward(nn.Module):
    """W2 act(W1 x + b1) + b2 at each position (equation 2); swiglu is W2 (silu(Wg x) * W1 x) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.inner = nn.Linear(config.d_model, config.d_ff * (2 if config.activation == "swiglu" else 1))
        self.dropout = Dropout(config.activation_dropout)
        self.output = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        inner_BTF = self.inner(x_BTD)
        if self.activation == "relu":
            inner_BTF = F.relu(inner_BTF)
        elif self.activation == "gelu":
            inner_BTF = F.gelu(inner_BTF)
        else:
            gate_BTF, up_BTF = inner_BTF.chunk(2, dim=2)
            inner_BTF = F.silu(gate_BTF) * up_BTF
        return cast(Tensor, self.output(self.dropout(inner_BTF)))


# ── layers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm or RMSNorm over the model width."""
    kind = nn.LayerNorm if config.norm_type == "layer" else nn.RMSNorm
    return kind(config.d_model, eps=config.norm_eps)


class Residual(nn.Module):
    """norm(x + dropout(block(x))) as in the paper (section 5.4), or pre-norm: x + dropout(block(norm(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pre = config.norm_order == "pre"
        self.norm = make_norm(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre:
            return cast(Tensor, x_BTD + self.dropout(block(self.norm(x_BTD))))
        return cast(Tensor, self.norm(x_BTD + self.dropout(block(x_BTD))))


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward (Vaswani et al. 2017, figure 1, left)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config, rotary=config.position == "rope")
        self.feed_forward = FeedForward(config)
        self.residuals = nn.ModuleList(Residual(config) for _ in range(2))

    def forward(self, x_BSD: Tensor, mask_B11S: Tensor | None, maps: list[Tensor] | None = None) -> Tensor:
        attend, feed = self.residuals
        x_BSD = attend(x_BSD, lambda x: self.attention(x, self.attention.keys_values(x), mask_B11S, maps=maps))
        return cast(Tensor, feed(x_BSD, self.feed_forward))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's output, feed-forward (figure 1, right)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config, rotary=config.position == "rope")
        self.cross_attention = Attention(config, rotary=False)
        self.feed_forward = FeedForward(config)
        self.residuals = nn.ModuleList(Residual(config) for _ in range(3))

    def forward(
        self, x_BTD: Tensor, memory_BSD: Tensor, mask_B11S: Tensor | None, maps: list[Tensor] | None = None
    ) -> Tensor:
        """All positions at once, as in training; CachedDecoder computes one position with the same blocks."""
        attend, cross, feed = self.residuals
        this, that = self.attention, self.cross_attention
        x_BTD = attend(x_BTD, lambda x: this(x, this.keys_values(x), causal=True, maps=maps))
        x_BTD = cross(x_BTD, lambda x: that(x, that.keys_values(memory_BSD), mask_B11S, maps=maps))
        return cast(Tensor, feed(x_BTD, self.feed_forward))


# ── the whole model ─────────────────────────────────────────────────────────────────────────────────────────────────


class Transformer(nn.Module):
    """Encoder, decoder and embeddings. With `src_vocab` None one matrix embeds both languages and is the output's too.

    The output projection is the target embedding itself, without a bias (section 3.4).
    """

    def __init__(self, config: ModelConfig, tgt_vocab: int, src_vocab: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(tgt_vocab, config.d_model)
        self.src_embedding = None if src_vocab is None else nn.Embedding(src_vocab, config.d_model)
        self.position = nn.Embedding(config.max_positions, config.d_model) if config.position == "learned" else None
        self.sinusoid: Tensor
        self.register_buffer("sinusoid", sinusoids(512, config.d_model), persistent=False)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.decoder_layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers or config.layers))
        # A pre-norm stack ends in a sum that nothing has normalised; a post-norm stack ends in a norm already.
        final = make_norm if config.norm_order == "pre" else lambda _: nn.Identity()
        self.encoder_norm, self.decoder_norm = final(config), final(config)
        self.dropout = Dropout(config.dropout)
        self.apply(initialise)

    def embed(self, ids_BT: Tensor, embedding: nn.Embedding, start: int = 0) -> Tensor:
        """Embedding times sqrt(D), plus position, dropped out (section 3.4, 3.5 and 5.4); the first has `start`."""
        x_BTD = embedding(ids_BT) * math.sqrt(self.config.d_model)
        end = start + ids_BT.shape[1]
        if self.config.position == "sinusoidal":
            if end > len(self.sinusoid):
                self.sinusoid = sinusoids(2 * end, self.config.d_model).to(x_BTD.device)
            x_BTD = x_BTD + self.sinusoid[start:end].to(x_BTD.dtype)
        elif self.position is not None:
            if end > self.config.max_positions:
                raise ValueError(f"{end} tokens, but model.max_positions is {self.config.max_positions}")
            x_BTD = x_BTD + self.position.weight[start:end]
        return cast(Tensor, self.dropout(x_BTD))

    def encode(self, src_BS: Tensor, maps: list[Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """The encoder's output [B, S, D] and the mask of its real tokens [B, 1, 1, S], None if nothing is padded."""
        mask_B11S: Tensor | None = (src_BS != PAD)[:, None, None, :]
        # A mask that hides nothing costs time on a CPU; to ask a GPU would make the host wait for it.
        if mask_B11S is not None and mask_B11S.device.type == "cpu" and bool(mask_B11S.all()):
            mask_B11S = None
        x_BSD = self.embed(src_BS, self.src_embedding or self.embedding)
        for layer in self.encoder:
            x_BSD = layer(x_BSD, mask_B11S, maps)
        return self.encoder_norm(x_BSD), mask_B11S

    def decode(
        self, tgt_BT: Tensor, memory_BSD: Tensor, mask_B11S: Tensor | None, maps: list[Tensor] | None = None
    ) -> Tensor:
        """Hidden states [B, T, D] of the target shifted right (bos first), each seeing no later token."""
        x_BTD = self.embed(tgt_BT, self.embedding)
        for layer in self.decoder_layers:
            x_BTD = layer(x_BTD, memory_BSD, mask_B11S, maps)
        return cast(Tensor, self.decoder_norm(x_BTD))

    def forward(self, src_BS: Tensor, tgt_BT: Tensor) -> Tensor:
        """Hidden states [B, T, D] by teacher forcing; `logits` turns them into scores of the next token."""
        return self.decode(tgt_BT, *self.encode(src_BS))

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Scores [B, T, V] of the next token: the product with the target embedding (section 3.4)."""
        return F.linear(hidden_BTD, self.embedding.weight)

    def attention_maps(self, src_BS: Tensor, tgt_BT: Tensor) -> dict[str, list[Tensor]]:
        """Weights [B, H, looking, looked at] of each layer: `encoder`, `decoder` and `cross`."""
        encoder: list[Tensor] = []
        decoder: list[Tensor] = []
        self.decode(tgt_BT, *self.encode(src_BS, encoder), decoder)
        return {"encoder": encoder, "decoder": decoder[0::2], "cross": decoder[1::2]}

    @torch.no_grad()
    def decoder(self, src_BS: Tensor, beam: int) -> "CachedDecoder":
        """A decoder that takes one token at a time, `beam` adjacent rows for each source; see nmt.search.Decoder."""
        multiple = SENTENCES if half_on_cpu(self.embedding.weight) else 1
        src_BS = torch.cat([src_BS, src_BS[-1:].expand(filled(len(src_BS), multiple) - len(src_BS), -1)])
        return CachedDecoder(self, *self.encode(src_BS), beam, multiple)


def initialise(module: nn.Module) -> None:
    """Projections Xavier-uniform, embeddings N(0, 1/D), biases 0, as tensor2tensor has them, the paper's own code.

    But two things as fairseq has them, which make a post-norm model learn to align in half of the updates
    (docs/experiments.md): queries, keys and values are 1/sqrt(2) of that, so attention begins flatter, and the
    feed-forward matrices are uniform within 1/sqrt(fan-in), so that each block adds little to what it is added to.
    """
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
    elif isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(module.weight)
    elif isinstance(module, Attention):
        for projection in (module.query.weight.data, *module.key_value.weight.data.chunk(2)):
            nn.init.xavier_uniform_(projection, gain=1 / math.sqrt(2))
    elif isinstance(module, FeedForward):
        for matrix in (module.inner.weight, module.output.weight):
            nn.init.uniform_(matrix, -1 / math.sqrt(matrix.shape[1]), 1 / math.sqrt(matrix.shape[1]))


SENTENCES = 8
"""In half precision a CPU decodes multiples of so many sentences: oneDNN makes new code for each number of rows."""


def half_on_cpu(x: Tensor) -> bool:
    """Whether a CPU computes with this in bfloat16 or float16, where oneDNN does the products."""
    return x.dtype.itemsize == 2 and x.device.type == "cpu"


def filled(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple, or to a power of two below it: so a few sentences stay few."""
    return min(1 << (count - 1).bit_length(), -(-count // multiple) * multiple)


class CachedDecoder:
    """Keeps the keys and values of the source, and of all tokens so far, once for each sentence.

    The W rows of a sentence ask as if they were tokens of one text: about its source, and about all that its rows have
    said. A mask shows to each row what it goes on from; when rows change places, that alone is put in order. There are
    always `filled` sentences; those that nobody has asked for stand at the end, and are computed in vain.
    """

    def __init__(
        self, model: Transformer, memory_BSD: Tensor, mask_B11S: Tensor | None, beam: int, multiple: int = 1
    ) -> None:
        self.model, self.beam, self.length, self.multiple = model, beam, 0, multiple
        self.asked = len(memory_BSD)  # Or fewer, before the first `select`; it only looks for what has moved then.
        self.mask_B11S = mask_B11S
        self.layers = [cast(DecoderLayer, layer) for layer in model.decoder_layers]
        # Attention of so few rows takes a CPU twice as long in half precision as in float32.
        kept = torch.float32 if half_on_cpu(memory_BSD) else memory_BSD.dtype
        cross = (layer.cross_attention.keys_values(memory_BSD) for layer in self.layers)
        self.cross = [(key_BGSK.to(kept), value_BGSK.to(kept)) for key_BGSK, value_BGSK in cross]
        key_BGSK = self.cross[0][0]
        B, G, _, K = key_BGSK.shape
        # Of each layer the keys and the values, with room for T tokens of each row.
        self.past_B2TWGK = [key_BGSK.new_empty(B, 2, 16, beam, G, K) for _ in self.layers]
        self.itself_R1W = torch.eye(beam, dtype=torch.bool, device=key_BGSK.device).repeat(B, 1)[:, None]
        self.history_RTW = self.itself_R1W[:, :0]

    def _look_back(self, number: int, x_BWD: Tensor, mask_B1WS: Tensor | None) -> Tensor:
        attention, past_B2TWGK = self.layers[number].attention, self.past_B2TWGK[number]
        for which, now_BGWK in enumerate(attention.keys_values(x_BWD, self.length)):
            past_B2TWGK[:, which, self.length] = now_BGWK.transpose(1, 2)
        key_BGSK, value_BGSK = past_B2TWGK[:, :, : self.length + 1].flatten(2, 3).transpose(2, 3).unbind(1)
        return cast(Tensor, attention(x_BWD, (key_BGSK, value_BGSK), mask_B1WS, at=self.length))

    @torch.no_grad()
    def step(self, last_R: Tensor) -> Tensor:
        """Scores [R, V] of the token after `last_R`."""
        wanted, rows = len(last_R), len(self.cross[0][0]) * self.beam
        last_R = F.pad(last_R, (0, rows - wanted))
        # The rows of a sentence begin equal, so the first step is worked out for one of them.
        last_BW = last_R.view(-1, self.beam)[:, : self.beam if self.length else 1]
        B, W = last_BW.shape
        if self.length == self.past_B2TWGK[0].shape[2]:
            self.past_B2TWGK = [torch.cat([past, torch.empty_like(past)], dim=2) for past in self.past_B2TWGK]
        self.history_RTW = torch.cat([self.history_RTW, self.itself_R1W[: len(last_R)]], dim=1)
        mask_B1WS = self.history_RTW.view(B, 1, self.beam, -1)[:, :, :W] if self.beam > 1 else None
        x_BWD = self.model.embed(last_BW.reshape(-1, 1), self.model.embedding, start=self.length).view(B, W, -1)
        for number, layer in enumerate(self.layers):
            attend, cross, feed = layer.residuals
            x_BWD = attend(x_BWD, lambda x, number=number: self._look_back(number, x, mask_B1WS))
            x_BWD = cross(
                x_BWD,
                lambda x, number=number: self.layers[number].cross_attention(x, self.cross[number], self.mask_B11S),
            )
            x_BWD = feed(x_BWD, layer.feed_forward)
        self.length += 1
        logits_BWV = self.model.logits(self.model.decoder_norm(x_BWD))
        return logits_BWV.expand(-1, self.beam, -1).flatten(0, 1)[:wanted]

    @torch.no_grad()
    def select(self, rows_R: Tensor) -> None:
        """Go on with these rows; a sentence's rows stay together, and it leaves when none of them is named."""
        before, self.asked = self.asked, len(rows_R) // self.beam
        rows = filled(self.asked, self.multiple) * self.beam
        rows_R = torch.cat([rows_R, torch.arange(len(rows_R), rows, device=rows_R.device)])
        self.history_RTW = self.history_RTW[rows_R]
        from_B = rows_R[:: self.beam] // self.beam
        if self.asked < before:
            # Only sentences that take the place of another are copied: the search lets the rest stay where they are.
            to_N = (from_B != torch.arange(len(from_B), device=from_B.device)).nonzero().squeeze(1)
            masks = [] if self.mask_B11S is None else [self.mask_B11S]
            for kept_B in (*self.past_B2TWGK, *itertools.chain(*self.cross), *masks):
                kept_B[to_N] = kept_B[from_B[to_N]]
            self.past_B2TWGK = [past[: len(from_B)] for past in self.past_B2TWGK]
            self.cross = [(key[: len(from_B)], value[: len(from_B)]) for key, value in self.cross]
            self.mask_B11S = None if self.mask_B11S is None else self.mask_B11S[: len(from_B)]
