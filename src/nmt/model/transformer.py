"""The Transformer of Vaswani et al. 2017, "Attention Is All You Need", and its modern variants.

A tensor's name ends in its shape: B sentences, S source tokens, T target tokens, D model width, H heads, G key-value
heads, K width of a head, F inner width, V vocabulary, R beam rows. A bias is added to attention scores: 0 where a token
may be looked at, -inf where not. Read from the top: attention, feed-forward, sublayer connection, layers, Transformer.
Positions, dropout and the cached decoder have files of their own.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.config import ModelConfig
from nmt.model.dropout import Dropout
from nmt.model.positions import Positions, Rotation, apply_rope
from nmt.special_tokens import PAD

# ── attention and feed-forward ────────────────────────────────────────────────────────────────────────────────────────


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2): softmax(Q K^T / sqrt(K)) V for each head.

    Keys and values are made apart from the answer, so that a decoder can keep them. With fewer key-value heads than
    heads, each is shared by heads / kv_heads queries (Ainslie et al. 2023), and never copied for them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_dim = config.d_model // config.heads
        self.dropout = config.attention_dropout
        self.q_proj = nn.Linear(config.d_model, config.d_model)
        self.kv_proj = nn.Linear(config.d_model, 2 * self.kv_heads * self.head_dim)
        self.out_proj = nn.Linear(config.d_model, config.d_model)

    def _split(self, x_BTD: Tensor, heads: int, rotation: Rotation | None = None) -> Tensor:
        x_BHTK = x_BTD.view(*x_BTD.shape[:2], heads, self.head_dim).transpose(1, 2)
        return x_BHTK if rotation is None else apply_rope(x_BHTK, rotation)

    def keys_values(self, memory_BSD: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of these tokens, both [B, G, S, K]; `rotation` has their positions, or one for all."""
        key_BSD, value_BSD = self.kv_proj(memory_BSD).chunk(2, dim=2)
        return self._split(key_BSD, self.kv_heads, rotation), self._split(value_BSD, self.kv_heads)

    def forward(
        self,
        x_BTD: Tensor,
        keys_values: tuple[Tensor, Tensor],
        bias: Tensor | None = None,
        *,
        causal: bool = False,
        rotation: Rotation | None = None,
        attn_weights: list[Tensor] | None = None,
    ) -> Tensor:
        """What each token of x finds where the bias, [B, 1, 1 or T, S], lets it look; or `causal`, at no later token.

        With `attn_weights` the weights [B, H, T, S] are worked out visibly and appended.
        """
        query_BHTK = self._split(self.q_proj(x_BTD), self.heads, rotation)
        key_BGSK, value_BGSK = keys_values
        shared = self.heads // self.kv_heads
        if attn_weights is None:
            # A decoder may keep its keys more exactly than it asks.
            grouped_BHTK = query_BHTK.to(key_BGSK.dtype)
            dropout = self.dropout if self.training else 0.0
            if shared > 1 and not causal:
                # Queries that share keys and values stand as further tokens: on a GPU no fused kernel takes a bias
                # and fewer key-value heads than heads. With `causal` they would no longer be in the order of time.
                grouped_BHTK = grouped_BHTK.reshape(len(x_BTD), self.kv_heads, -1, self.head_dim)
                bias = bias if bias is None or bias.shape[2] == 1 else bias.repeat(1, 1, shared, 1)
            context_BHTK = F.scaled_dot_product_attention(
                grouped_BHTK,
                key_BGSK,
                value_BGSK,
                bias,
                dropout_p=dropout,
                is_causal=causal,
                enable_gqa=shared > 1 and causal,
            )
            context_BHTK = context_BHTK.view(query_BHTK.shape).to(query_BHTK.dtype)
        else:
            key_BHSK, value_BHSK = (kv.repeat_interleave(shared, 1) for kv in keys_values)
            weights_BHTS = attention_weights(query_BHTK, key_BHSK, bias, causal=causal)
            attn_weights.append(weights_BHTS)
            context_BHTK = weights_BHTS @ value_BHSK
        return cast(Tensor, self.out_proj(context_BHTK.transpose(1, 2).flatten(2)))


def attention_weights(query_BHTK: Tensor, key_BHSK: Tensor, bias: Tensor | None = None, *, causal: bool) -> Tensor:
    """softmax(Q K^T / sqrt(K)) as [B, H, T, S]: row t says how much token t looks at each token s (equation 1)."""
    score_BHTS = query_BHTK @ key_BHSK.transpose(2, 3) / math.sqrt(query_BHTK.shape[-1])
    if causal:
        past_TS = torch.ones(score_BHTS.shape[-2:], dtype=torch.bool, device=score_BHTS.device).tril()
        score_BHTS = score_BHTS.masked_fill(~past_TS, -math.inf)
    if bias is not None:
        score_BHTS = score_BHTS + bias
    return score_BHTS.softmax(dim=-1)


def attention_bias(may_look: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `may_look`, -inf elsewhere. Of a boolean mask attention makes the same, but in each layer again."""
    return torch.zeros(may_look.shape, dtype=dtype, device=may_look.device).masked_fill_(~may_look, -math.inf)


class FeedForward(nn.Module):
    """W2 act(W1 x + b1) + b2 at each position (equation 2); swiglu is W2 (silu(Wg x) * W1 x) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.fc1 = nn.Linear(config.d_model, config.d_ff * (2 if config.activation == "swiglu" else 1))
        self.dropout = Dropout(config.activation_dropout)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        inner_BTF = self.fc1(x_BTD)
        if self.activation == "relu":
            inner_BTF = F.relu(inner_BTF)
        elif self.activation == "gelu":
            inner_BTF = F.gelu(inner_BTF)
        else:
            gate_BTF, up_BTF = inner_BTF.chunk(2, dim=2)
            inner_BTF = F.silu(gate_BTF) * up_BTF
        return cast(Tensor, self.fc2(self.dropout(inner_BTF)))


# ── layers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm or RMSNorm over the model width."""
    kind = nn.LayerNorm if config.norm_type == "layer" else nn.RMSNorm
    return kind(config.d_model, eps=config.norm_eps)


class SublayerConnection(nn.Module):
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
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.sublayers = nn.ModuleList(SublayerConnection(config) for _ in range(2))

    def forward(
        self,
        x_BSD: Tensor,
        bias_B11S: Tensor | None,
        rotation: Rotation | None = None,
        attn_weights: list[Tensor] | None = None,
    ) -> Tensor:
        attend, feed = self.sublayers
        this = self.attention
        x_BSD = attend(
            x_BSD,
            lambda x: this(x, this.keys_values(x, rotation), bias_B11S, rotation=rotation, attn_weights=attn_weights),
        )
        return cast(Tensor, feed(x_BSD, self.feed_forward))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's output, feed-forward (figure 1, right)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.cross_attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.sublayers = nn.ModuleList(SublayerConnection(config) for _ in range(3))

    def forward(
        self,
        x_BTD: Tensor,
        memory_BSD: Tensor,
        bias_B11S: Tensor | None,
        rotation: Rotation | None = None,
        attn_weights: list[Tensor] | None = None,
    ) -> Tensor:
        """All positions at once, as in training; CachedDecoder computes one position with the same blocks."""
        attend, cross, feed = self.sublayers
        this, that = self.attention, self.cross_attention
        x_BTD = attend(
            x_BTD,
            lambda x: this(x, this.keys_values(x, rotation), causal=True, rotation=rotation, attn_weights=attn_weights),
        )
        x_BTD = cross(x_BTD, lambda x: that(x, that.keys_values(memory_BSD), bias_B11S, attn_weights=attn_weights))
        return cast(Tensor, feed(x_BTD, self.feed_forward))


# ── the whole model ───────────────────────────────────────────────────────────────────────────────────────────────────


class Transformer(nn.Module):
    """Encoder, decoder and embeddings. With `src_vocab` None one matrix embeds both languages and is the output's too.

    The output projection is the target embedding itself, without a bias (section 3.4).
    """

    def __init__(self, config: ModelConfig, tgt_vocab: int, src_vocab: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(tgt_vocab, config.d_model)
        self.src_embedding = None if src_vocab is None else nn.Embedding(src_vocab, config.d_model)
        self.positions = Positions(config)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.decoder_layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers or config.layers))
        # A pre-norm stack ends in a sum that nothing has normalised; a post-norm stack ends in a norm already.
        final = make_norm if config.norm_order == "pre" else lambda _: nn.Identity()
        self.encoder_norm, self.decoder_norm = final(config), final(config)
        self.dropout = Dropout(config.dropout)
        self.apply(init_weights)

    def embed(self, ids_BT: Tensor, embedding: nn.Embedding, start: int = 0) -> Tensor:
        """Embedding times sqrt(D), plus position, dropped out (section 3.4, 3.5 and 5.4); the first has `start`."""
        x_BTD = embedding(ids_BT) * math.sqrt(self.config.d_model)
        added_TD = self.positions.added(start, start + ids_BT.shape[1])
        if added_TD is not None:
            x_BTD = x_BTD + added_TD.to(x_BTD.dtype)
        return cast(Tensor, self.dropout(x_BTD))

    def encode(self, src_BS: Tensor, attn_weights: list[Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """The encoder's output [B, S, D] and the bias [B, 1, 1, S] that hides padding, None if nothing is padded."""
        x_BSD = self.embed(src_BS, self.src_embedding or self.embedding)
        real_B11S = (src_BS != PAD)[:, None, None, :]
        bias_B11S = None
        # A bias that hides nothing costs time on a CPU; to ask a GPU would make the host wait for it.
        if real_B11S.device.type != "cpu" or not bool(real_B11S.all()):
            bias_B11S = attention_bias(real_B11S, product_dtype(x_BSD))
        rotation = self.positions.rotation(0, src_BS.shape[1])
        for layer in self.encoder:
            x_BSD = layer(x_BSD, bias_B11S, rotation, attn_weights)
        return self.encoder_norm(x_BSD), bias_B11S

    def decode(
        self, tgt_BT: Tensor, memory_BSD: Tensor, bias_B11S: Tensor | None, attn_weights: list[Tensor] | None = None
    ) -> Tensor:
        """Hidden states [B, T, D] of the target shifted right (bos first), each seeing no later token."""
        x_BTD = self.embed(tgt_BT, self.embedding)
        rotation = self.positions.rotation(0, tgt_BT.shape[1])
        for layer in self.decoder_layers:
            x_BTD = layer(x_BTD, memory_BSD, bias_B11S, rotation, attn_weights)
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


def init_weights(module: nn.Module) -> None:
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
        for projection in (module.q_proj.weight.data, *module.kv_proj.weight.data.chunk(2)):
            nn.init.xavier_uniform_(projection, gain=1 / math.sqrt(2))
    elif isinstance(module, FeedForward):
        for matrix in (module.fc1.weight, module.fc2.weight):
            nn.init.uniform_(matrix, -1 / math.sqrt(matrix.shape[1]), 1 / math.sqrt(matrix.shape[1]))


def product_dtype(x: Tensor) -> torch.dtype:
    """The type that matrix products with x are computed in: that of autocast where it is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
