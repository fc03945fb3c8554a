"""From the last hidden states to logits."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def logits(x: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
    """The head's products over `scaling`, the config's logits_scaling.

    Args:
        x: [..., hidden_size].
        weight: [vocab_size, hidden_size].

    Returns:
        [..., vocab_size] in float32.
    """
    return F.linear(x, weight).float() / scaling
