"""From the last hidden states to logits."""

from __future__ import annotations

import torch

from granite4_neuron.ops.quantization import linear


def logits(x: torch.Tensor, weight: torch.Tensor, scaling: float, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The head's products over `scaling`, the config's logits_scaling.

    Args:
        x: [..., hidden_size].
        weight, scale: [vocab_size, hidden_size] and, of quantized weights, [vocab_size]; see `quantization.linear`.

    Returns:
        [..., vocab_size] in float32.
    """
    return linear(x, weight, scale=scale).float() / scaling
