"""Where a token stands: sinusoids added to its embedding (the paper), learned vectors, or rotated queries and keys.

A tensor's name ends in its shape: T tokens, D model width, H heads, K width of a head, N pairs of channels.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.config import ModelConfig

ROWS = 1024
"""Positions that a table begins with. A longer text makes a larger one, outside of what is compiled."""


def angles(positions: int, width: int) -> Tensor:
    """pos / 10000^(2i/width) as [positions, width / 2], in float64: at position 1000 float32 has lost four digits.

    Vaswani et al. 2017, section 3.5; Su et al. 2021, equation 15.
    """
    frequency_N = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))
    return torch.arange(positions, dtype=torch.float64)[:, None] * frequency_N


def sinusoids(positions: int, width: int) -> Tensor:
    """PE(pos, 2i) = sin, PE(pos, 2i+1) = cos of the same angle, from position 0 (Vaswani et al. 2017, section 3.5)."""
    angle_TN = angles(positions, width)
    return torch.stack([angle_TN.sin(), angle_TN.cos()], dim=2).flatten(1).float()


class Rotation(NamedTuple):
    """Cosine and sine of the angle by which each pair of channels is turned at each position."""

    cos_TN: Tensor
    sin_TN: Tensor


def apply_rope(x_BHTK: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair of channels (2i, 2i+1) by the angle of its position (Su et al. 2021, equation 34).

    The product of a query and a key then depends on the distance of their positions alone.
    """
    cos_TN, sin_TN = (part.to(x_BHTK.dtype) for part in rotation)
    even, odd = x_BHTK[..., 0::2], x_BHTK[..., 1::2]
    return torch.stack([even * cos_TN - odd * sin_TN, even * sin_TN + odd * cos_TN], dim=-1).flatten(-2)


class Positions(nn.Module):
    """What a kind of position adds to the embeddings and how it turns queries and keys, once for all layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind, self.d_model, self.head_dim = config.position, config.d_model, config.d_model // config.heads
        self.learned = nn.Embedding(config.max_positions, config.d_model) if self.kind == "learned" else None
        self.table: Tensor
        self.register_buffer("table", None if self.learned else self._make(ROWS), persistent=False)

    def _make(self, positions: int) -> Tensor:
        """[T, D] for sinusoids, [2, T, N] for rotations."""
        if self.kind == "sinusoidal":
            return sinusoids(positions, self.d_model)
        angle_TN = angles(positions, self.head_dim)
        return torch.stack([angle_TN.cos(), angle_TN.sin()]).float()

    def _rows(self, start: int, end: int) -> Tensor:
        if end > self.table.shape[-2]:
            self.table = self._make(2 * end).to(self.table.device)
        return self.table[..., start:end, :]

    def added(self, start: int, end: int) -> Tensor | None:
        """[T, D] to add to the embeddings of the positions from `start` to before `end`; None if nothing is.

        Raises ValueError where `learned` has no vector.
        """
        if self.kind == "sinusoidal":
            return self._rows(start, end)
        if self.learned is None:
            return None
        if end > self.learned.num_embeddings:
            raise ValueError(f"{end} tokens, but model.max_positions is {self.learned.num_embeddings}")
        return self.learned.weight[start:end]

    def rotation(self, start: int, end: int) -> Rotation | None:
        """How self-attention turns queries and keys at these positions; None if it doesn't."""
        return Rotation(*self._rows(start, end)) if self.kind == "rope" else None
