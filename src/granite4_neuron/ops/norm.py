"""Root mean square normalisation, plain and gated; and the residual sum."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, n_groups: int = 1) -> torch.Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight, the mean taken over each of `n_groups` equal parts of the last axis.

    Args:
        x: [..., channels].
        weight: [channels].

    Returns:
        [..., channels] in weight's dtype; arithmetic is float32.
    """
    if n_groups > 1:
        width = x.shape[-1] // n_groups
        groups = (slice(start, start + width) for start in range(0, x.shape[-1], width))
        return torch.cat([rms_norm(x[..., group], weight[group], eps) for group in groups], dim=-1)
    x = x.float()
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return (x * scale * weight.float()).to(weight.dtype)


def rms_norm_gated(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, n_groups: int) -> torch.Tensor:
    """Compute `rms_norm` of x * silu(z): the gate comes first (Mamba-2's norm_before_gate=False).

    Args:
        x, z: [..., channels].
        weight: [channels].

    Returns:
        [..., channels] in weight's dtype; arithmetic is float32.
    """
    return rms_norm(x.float() * F.silu(z.float()), weight, eps, n_groups)


def residual_add(x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    """Compute x + alpha * y in x's dtype: float32, the residual stream's."""
    return torch.add(x, y, alpha=alpha)
