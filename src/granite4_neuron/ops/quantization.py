"""Products with weights that may be quantized.

Only weights are quantized. Activations keep their dtype, so a product is exact for a slightly different matrix.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.ops.weight import Weight, as_tensor


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `torch.nn.functional.linear`, with the dequantized weight if it is quantized.

    Args:
        x: [..., columns].
        weight: [rows, columns]; a tensor in x's dtype.
        bias: [rows] in x's dtype.
    """
    return F.linear(x, as_tensor(weight, x.dtype), bias)


def embedding(ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Look up rows of a table [rows, columns]: [...] ids to [..., columns] in float32."""
    return F.embedding(ids, weight).float() if isinstance(weight, torch.Tensor) else weight.rows(ids)
