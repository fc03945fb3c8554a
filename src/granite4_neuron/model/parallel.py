"""Tensor parallelism: how ranks split a model, and how they communicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed

from granite4_neuron.model.linear import Linear, Matrix

# The operators of functional collectives, which a compiler recognises. They take a group's name; the group need not
# exist where a graph is only traced.
_collectives = torch.ops._c10d_functional


@dataclass(frozen=True)
class Parallel:
    """One rank's place among `degree` ranks.

    group: the name of the process group of all ranks. With None and a degree above 1 the rank is alone: it computes its
        own partial sums, and no others are added. This is for inspecting a rank's graph, not for results.
    """

    rank: int = 0
    degree: int = 1
    group: str | None = None

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        if self.group is None:
            return partial
        return _collectives.wait_tensor(_collectives.all_reduce(partial, "sum", self.group))

    def all_reduce_together(self, *partials: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the sums of several tensors of one dtype, in one message."""
        if self.group is None:
            return partials
        total = self.all_reduce(torch.cat([partial.flatten() for partial in partials]))
        ends = accumulate(partial.numel() for partial in partials)
        return [total[end - each.numel() : end].view_as(each) for each, end in zip(partials, ends, strict=True)]

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return all ranks' parts side by side on the last axis."""
        if self.group is None:
            return part
        gathered = _collectives.all_gather_into_tensor(part.flatten(), self.degree, self.group)
        parts = _collectives.wait_tensor(gathered)
        return torch.cat([each.view_as(part) for each in parts.view(self.degree, -1)], dim=-1)


class RowParallelLinear(Linear):
    """A projection whose input is split over the ranks: float32 partial sums are added, and then the bias once."""

    def __init__(self, in_features: int, out_features: int, bias: bool, parallel: Parallel):
        super().__init__(in_features, out_features, bias=bias)
        self.parallel = parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features of this rank] to [..., out_features]."""
        if self.parallel.degree == 1:
            return super().forward(x)
        total = self.parallel.all_reduce(self.operators.linear(x, self.weight, None).float())
        return total if self.bias is None else total + self.bias.float()


class VocabParallelEmbedding(Matrix):
    """An embedding whose rows are split over the ranks in equal, consecutive parts.

    first_row: this rank's first row, [1], int32. It is a tensor, so that a graph takes it as an input: if it were a
        constant, every rank would have to compile a graph of its own.
    """

    may_be_quantized = False
    first_row: torch.Tensor

    def __init__(self, rows: int, width: int, parallel: Parallel):
        super().__init__(rows, width)
        self.num_embeddings = rows
        self.parallel = parallel
        # On the CPU even if the model is made on the meta device: no checkpoint has this value.
        first_row = torch.tensor([parallel.rank * rows], dtype=torch.int32, device="cpu")
        self.register_buffer("first_row", first_row, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map [...] token ids to [..., width] in float32."""
        if self.parallel.degree == 1:
            return self.operators.embedding(ids, self.weight)
        local = ids - self.first_row
        here = (local >= 0) & (local < self.num_embeddings)
        rows = self.operators.embedding(local.where(here, 0), self.weight)
        return self.parallel.all_reduce(rows.masked_fill(~here[..., None], 0.0))
