"""Decoding one token at a time, with the keys and values of all tokens before it in a cache.

A tensor's name ends in its shape, as in nmt.model.transformer; W beam rows of a sentence, R rows of all sentences.
"""

import itertools
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.model.positions import Rotation
from nmt.model.transformer import DecoderLayer, Transformer, attention_bias

BATCH_MULTIPLE = 8
"""In half precision a CPU decodes multiples of so many sentences: oneDNN makes new code for each number of rows."""


def half_on_cpu(x: Tensor) -> bool:
    """Whether a CPU computes with this in bfloat16 or float16, where oneDNN does the products."""
    return x.dtype.itemsize == 2 and x.device.type == "cpu"


def round_up(count: int, multiple: int) -> int:
    """`count` rounded up to a multiple, or to a power of two below it: so a few sentences stay few."""
    return min(1 << (count - 1).bit_length(), -(-count // multiple) * multiple)


class CachedDecoder:
    """Cache the keys and values of the source, and of all tokens so far, once for each sentence.

    The W rows of a sentence attend as tokens of one sequence, to its source and to the tokens of all its rows. An
    ancestry mask lets each row see its own prefix only; when rows are reordered, only this mask is. The number of
    sentences is padded by `round_up`; padding sentences are last.
    """

    @classmethod
    @torch.no_grad()
    def of(cls, model: Transformer, src_BS: Tensor, beam: int) -> "CachedDecoder":
        """A decoder of these sources with `beam` adjacent rows for each; see nmt.decoding.search.Decoder."""
        multiple = BATCH_MULTIPLE if half_on_cpu(model.embedding.weight) else 1
        src_BS = torch.cat([src_BS, src_BS[-1:].expand(round_up(len(src_BS), multiple) - len(src_BS), -1)])
        return cls(model, *model.encode(src_BS), beam, multiple)

    def __init__(
        self, model: Transformer, memory_BSD: Tensor, bias_B11S: Tensor | None, beam: int, multiple: int = 1
    ) -> None:
        self.model, self.beam, self.length, self.multiple = model, beam, 0, multiple
        self.asked = len(memory_BSD)  # Or fewer, before the first `select`; it only looks for what has moved then.
        self.layers = [cast(DecoderLayer, layer) for layer in model.decoder_layers]
        # Attention of so few rows takes a CPU twice as long in half precision as in float32.
        kept = torch.float32 if half_on_cpu(memory_BSD) else memory_BSD.dtype
        self.bias_B11S = None if bias_B11S is None else bias_B11S.to(kept)
        cross = (layer.cross_attention.keys_values(memory_BSD) for layer in self.layers)
        self.cross = [(key_BGSK.to(kept), value_BGSK.to(kept)) for key_BGSK, value_BGSK in cross]
        key_BGSK = self.cross[0][0]
        B, G, _, K = key_BGSK.shape
        # Of each layer the keys and the values, with room for T tokens of each row.
        self.cache_B2TWGK = [key_BGSK.new_empty(B, 2, 16, beam, G, K) for _ in self.layers]
        self.itself_R1W = torch.eye(beam, dtype=torch.bool, device=key_BGSK.device).repeat(B, 1)[:, None]
        self.ancestry_RTW = self.itself_R1W[:, :0]

    def _self_attend(self, number: int, x_BWD: Tensor, bias_B1WS: Tensor | None, rotation: Rotation | None) -> Tensor:
        attention, cache_B2TWGK = self.layers[number].attention, self.cache_B2TWGK[number]
        for which, now_BGWK in enumerate(attention.keys_values(x_BWD, rotation)):
            cache_B2TWGK[:, which, self.length] = now_BGWK.transpose(1, 2)
        key_BGSK, value_BGSK = cache_B2TWGK[:, :, : self.length + 1].flatten(2, 3).transpose(2, 3).unbind(1)
        return cast(Tensor, attention(x_BWD, (key_BGSK, value_BGSK), bias_B1WS, rotation=rotation))

    @torch.no_grad()
    def step(self, last_R: Tensor) -> Tensor:
        """Scores [R, V] of the token after `last_R`."""
        wanted, rows = len(last_R), len(self.cross[0][0]) * self.beam
        last_R = F.pad(last_R, (0, rows - wanted))
        # The rows of a sentence begin equal, so the first step is worked out for one of them.
        last_BW = last_R.view(-1, self.beam)[:, : self.beam if self.length else 1]
        B, W = last_BW.shape
        if self.length == self.cache_B2TWGK[0].shape[2]:
            self.cache_B2TWGK = [torch.cat([past, torch.empty_like(past)], dim=2) for past in self.cache_B2TWGK]
        self.ancestry_RTW = torch.cat([self.ancestry_RTW, self.itself_R1W[: len(last_R)]], dim=1)
        bias_B1WS = None
        if self.beam > 1:
            bias_B1WS = attention_bias(self.ancestry_RTW.view(B, 1, self.beam, -1)[:, :, :W], self.cross[0][0].dtype)
        rotation = self.model.positions.rotation(self.length, self.length + 1)
        x_BWD = self.model.embed(last_BW.reshape(-1, 1), self.model.embedding, start=self.length).view(B, W, -1)
        for number, layer in enumerate(self.layers):
            attend, cross, feed = layer.sublayers
            x_BWD = attend(x_BWD, lambda x, number=number: self._self_attend(number, x, bias_B1WS, rotation))
            x_BWD = cross(
                x_BWD,
                lambda x, number=number: self.layers[number].cross_attention(x, self.cross[number], self.bias_B11S),
            )
            x_BWD = feed(x_BWD, layer.feed_forward)
        self.length += 1
        logits_BWV = self.model.logits(self.model.decoder_norm(x_BWD))
        return logits_BWV.expand(-1, self.beam, -1).flatten(0, 1)[:wanted]

    @torch.no_grad()
    def select(self, rows_R: Tensor) -> None:
        """Keep these rows in this order; rows of a sentence stay adjacent, and a sentence without rows is dropped."""
        before, self.asked = self.asked, len(rows_R) // self.beam
        rows = round_up(self.asked, self.multiple) * self.beam
        rows_R = torch.cat([rows_R, torch.arange(len(rows_R), rows, device=rows_R.device)])
        self.ancestry_RTW = self.ancestry_RTW[rows_R]
        from_B = rows_R[:: self.beam] // self.beam
        if self.asked < before:
            # Only sentences that take the place of another are copied: the search lets the rest stay where they are.
            to_N = (from_B != torch.arange(len(from_B), device=from_B.device)).nonzero().squeeze(1)
            biases = [] if self.bias_B11S is None else [self.bias_B11S]
            for kept_B in (*self.cache_B2TWGK, *itertools.chain(*self.cross), *biases):
                kept_B[to_N] = kept_B[from_B[to_N]]
            self.cache_B2TWGK = [past[: len(from_B)] for past in self.cache_B2TWGK]
            self.cross = [(key[: len(from_B)], value[: len(from_B)]) for key, value in self.cross]
            self.bias_B11S = None if self.bias_B11S is None else self.bias_B11S[: len(from_B)]
