"""From the last hidden states to logits."""

from __future__ import annotations

import torch

from granite4_neuron.ops.quantization import linear
from granite4_neuron.ops.weight import Weight


def logits(x: torch.Tensor, weight: Weight, scaling: float) -> torch.Tensor:
    """Compute the head's products divided by `scaling`, the config's logits_scaling.

    Args:
        x: [..., hidden_size].
        weight: [vocab_size, hidden_size]; a tensor in x's dtype.

    Returns:
        [..., vocab_size] in float32.
    """
    return linear(x, weight).float() / scaling
