"""Rotary position embedding, the half-rotation form of Llama."""

from __future__ import annotations

import torch


def rotary_tables(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of each position and frequency, [..., head_dim / 2] in float32.

    Source: Su et al. 2021, section 3.4.2; frequencies theta^(-2i / head_dim).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    # A rounding error in a frequency is multiplied by the position: divide as transformers does, to agree bit by bit.
    angles = positions[..., None].float() * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def apply_rotary(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate channel pairs (i, i + head_dim / 2) of x by its tokens' angles.

    Args:
        x: [batch, tokens, heads, head_dim].
        tables: from `rotary_tables` with positions [batch, tokens].

    Returns:
        As x, in x's dtype; arithmetic is float32.
    """
    cos, sin = (table[:, :, None] for table in tables)
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
