"""The reads and writes of recurrent states in a step, computed once for all Mamba layers of a cache group.

A row of a step is some certain tokens, then drafts. vLLM's bookkeeping (v1/worker/mamba_utils.py) expects the state
after the certain tokens in the first of the row's pages, and the state after each draft in one of the others. vLLM's
own metadata does not always give that, because it depends on a row's length and its place among the rows. The scheduler
pads single tokens to the length of a verify step with placeholders, so a prompt may advance the state by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend, Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from granite4_neuron.vllm.cpu.mixing import DecodeRows


@dataclass(frozen=True)
class Scan:
    """Certain tokens of one sequence; its state advances by all of them.

    tokens: their indices in the step.
    read: the state's page before them, None for an empty state. write: its page after them.
    """

    tokens: slice
    read: int | None
    write: int


@dataclass(frozen=True)
class Verify:
    """One certain token, and perhaps drafts, of each of several sequences that have a state.

    tokens: their indices in the step, sequence after sequence.
    """

    tokens: slice
    rows: DecodeRows


@dataclass(frozen=True)
class StepMetadata:
    """A step for the layers of one group. Tokens in none of its parts are padding or placeholders."""

    parts: list[Scan | Verify]


class StepMetadataBuilder(Mamba2AttentionMetadataBuilder):
    """Builds `StepMetadata` from the model runner's description of a step."""

    supports_update_block_table = False  # the parts hold pages

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        *,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        **kwargs: object,
    ) -> StepMetadata:
        """Build the metadata as vLLM's builder does.

        Args:
            num_accepted_tokens: [rows], int32, of each sequence's last step; None without speculation.
            num_decode_draft_tokens_cpu: [rows], how many drafts follow the only certain token; -1 for other rows.
        """
        step = common_attn_metadata
        pages = mamba_get_block_table_tensor(
            step.block_table_tensor, step.seq_lens, self.kv_cache_spec, self.vllm_config.cache_config.mamba_cache_mode
        )[:, : 1 + self.num_spec_tokens]
        starts = step.query_start_loc_cpu.tolist()
        sizes = [end - start for start, end in pairwise(starts)]
        drafts = [0] * len(sizes) if num_decode_draft_tokens_cpu is None else num_decode_draft_tokens_cpu.tolist()
        certain = [size - max(count, 0) for size, count in zip(sizes, drafts, strict=True)]
        has_state = [length > size for length, size in zip(step.seq_lens_cpu_upper_bound.tolist(), sizes, strict=True)]

        parts: list[Scan | Verify] = []
        for verified, group in groupby(range(len(sizes)), lambda row: has_state[row] and certain[row] == 1):
            rows = list(group)
            if verified:
                first, end = rows[0], rows[-1] + 1
                begins = step.query_start_loc[first : end + 1] - starts[first]
                accepted = None if num_accepted_tokens is None else num_accepted_tokens[first:end]
                parts.append(Verify(slice(starts[first], starts[end]), DecodeRows(begins, pages[first:end], accepted)))
                continue
            for row, checkpoint in zip(rows, self._checkpoints(step, rows), strict=True):
                parts += _scans(starts[row], certain[row], has_state[row], int(pages[row, 0]), *checkpoint)
        return StepMetadata(parts)

    def _checkpoints(self, step: CommonAttentionMetadata, rows: list[int]) -> Sequence[tuple[int, int]]:
        """Return, for each row, the number of its tokens after which the prefix cache wants a state (0 for none), and
        the page for it.
        """
        checkpoints = self.checkpoint_builder.build(step, rows)
        if checkpoints is None:
            return [(0, 0)] * len(rows)
        return list(zip(checkpoints.offsets, checkpoints.state_indices.tolist(), strict=True))


def _scans(start: int, certain: int, has_state: bool, page: int, checkpoint: int, kept_page: int) -> Iterator[Scan]:
    """Return a row's certain tokens, in two parts if the prefix cache wants a state in their middle."""
    if page <= 0:  # padding
        return
    read, end = page if has_state else None, start + certain
    if 0 < checkpoint < certain:  # vLLM counts a row's drafts too
        yield Scan(slice(start, start + checkpoint), read, kept_page)
        start, read = start + checkpoint, kept_page
    if start < end:
        yield Scan(slice(start, end), read, page)


class StepBackend(Mamba2AttentionBackend):
    """Names the builder to vLLM."""

    @staticmethod
    def get_builder_cls() -> type[StepMetadataBuilder]:
        return StepMetadataBuilder
