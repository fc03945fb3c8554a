"""vLLM's Mamba-2 layer with this package's convolution and recurrence. Loading, sharding and cache stay vLLM's."""

from __future__ import annotations

from functools import cached_property, lru_cache

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata

from granite4_neuron.config import MODEL_TYPE
from granite4_neuron.ops import cpu
from granite4_neuron.vllm_cpu.mixing import (
    DecodeRows,
    MixerWeights,
    Pages,
    fused_decode,
    fused_prefill,
    torch_decode,
    torch_prefill,
)


class Granite4MambaMixer2(MambaMixer2):
    """The mixer of Granite 4. For other models it behaves as MambaMixer2.

    Raises:
        ValueError: ReplaySSM or vLLM's method draft_model is requested.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        config, speculative = vllm_config.model_config.hf_text_config, vllm_config.speculative_config
        self.is_granite4 = config.model_type == MODEL_TYPE
        if self.is_granite4 and speculative is not None and speculative.uses_draft_model():
            raise ValueError(
                "vLLM's method draft_model cannot draft for or with a hybrid model; use custom_class with "
                "granite4_neuron.vllm_cpu.draft_model.DraftModelProposer."
            )
        if self.is_granite4 and self.use_replayssm:
            raise ValueError("granite4-neuron has no ReplaySSM; leave out --use-replayssm.")
        self.time_step_limit = tuple(getattr(config, "time_step_limit", None) or (0.0, float("inf")))
        self._paged_cache: tuple[torch.Tensor, ...] | None = None
        fused = cpu.has_fused_kernels()
        self.decode, self.prefill = (fused_decode, fused_prefill) if fused else (torch_decode, torch_prefill)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        if not self.is_granite4:
            return super().get_state_dtype()
        return self.model_config.dtype, torch.float32

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        """As vLLM's: convolution and recurrence of a step's tokens, from z, x, B, C and dt to `output`."""
        if not self.is_granite4:
            return super().conv_ssm_forward(projected_states, output)
        output.copy_(self.mix(projected_states[:, self.tped_intermediate_size :]))

    def mix(self, xBC_dt: torch.Tensor) -> torch.Tensor:
        """[tokens, conv_dim + num_heads] to [tokens, num_heads * head_dim] in float32; zeros for padding."""
        metadata = self._metadata()
        if metadata is None:  # vLLM is measuring the memory of a step
            return xBC_dt.new_zeros(len(xBC_dt), self.tped_intermediate_size, dtype=torch.float32)
        decodes, real = metadata.num_decode_tokens, metadata.num_decode_tokens + metadata.num_prefill_tokens
        parts = []
        if decodes:
            parts.append(self._decode(metadata, xBC_dt[:decodes]))
        if real > decodes:
            parts += self._prefill(metadata, xBC_dt[decodes:real])
        if len(xBC_dt) > real:
            parts.append(torch.zeros(len(xBC_dt) - real, self.tped_intermediate_size))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def decode_rows(self, tokens: int) -> tuple[Pages, DecodeRows] | None:
        """States and rows of a step that only decodes, a few tokens of each sequence; None for other steps."""
        metadata = self._metadata()
        if metadata is None or metadata.num_decode_tokens != tokens:
            return None
        return self._pages(), self._rows(metadata)

    def _metadata(self) -> Mamba2AttentionMetadata | None:
        of_layers = get_forward_context().attn_metadata
        return None if of_layers is None else of_layers.get(self.prefix)

    def _decode(self, metadata: Mamba2AttentionMetadata, xBC_dt: torch.Tensor) -> torch.Tensor:
        return self.decode(self.mixer_weights, xBC_dt, self._pages(), self._rows(metadata))

    def _rows(self, metadata: Mamba2AttentionMetadata) -> DecodeRows:
        pages = metadata.state_indices_tensor_d
        starts = metadata.query_start_loc_d
        if starts is None:
            starts = _one_token_each(len(pages))
        return DecodeRows(starts, pages, metadata.num_accepted_tokens)

    def _prefill(self, metadata: Mamba2AttentionMetadata, xBC_dt: torch.Tensor) -> list[torch.Tensor]:
        """One sequence after another, each in two parts if the prefix cache keeps a state in the middle."""
        weights, pages = self.mixer_weights, self._pages()
        starts = metadata.query_start_loc_p.tolist()
        own_pages = metadata.state_indices_tensor_p.tolist()
        checkpoint = metadata.checkpoint_meta if metadata.checkpoint_chunk_idx is not None else None
        kept_pages = checkpoint.state_indices.tolist() if checkpoint is not None else own_pages
        offsets = checkpoint.offsets if checkpoint is not None else [0] * len(own_pages)
        parts = []
        for row, has_state in enumerate(metadata.has_initial_states_p.tolist()):
            start, end, page = starts[row], starts[row + 1], own_pages[row]
            if page <= 0:  # padding
                parts.append(torch.zeros(end - start, self.tped_intermediate_size))
                continue
            read = page if has_state else None
            if offsets[row]:
                middle = start + offsets[row]
                parts.append(self.prefill(weights, xBC_dt[start:middle], pages, read, kept_pages[row]))
                start, read = middle, kept_pages[row]
            if start < end:
                parts.append(self.prefill(weights, xBC_dt[start:end], pages, read, page))
        return parts

    def _pages(self) -> Pages:
        """The pages of the cache that vLLM has bound last."""
        if self._paged_cache is not self.kv_cache:
            conv, ssm = self.kv_cache[:2]
            self._views = Pages(conv if is_conv_state_dim_first() else conv.transpose(1, 2), ssm)
            self._paged_cache = self.kv_cache
        return self._views

    def forget_weights(self) -> None:
        """Drop the cached weights, after vLLM has loaded new ones."""
        self.__dict__.pop("mixer_weights", None)

    @cached_property
    def mixer_weights(self) -> MixerWeights:
        return MixerWeights(
            self.conv_weights,
            self.conv1d.bias,
            self.dt_bias,
            self.A.abs().log(),  # A is negative, except with vLLM's random weights for benchmarks
            self.D,
            self.n_groups // self.tp_size,
            self.time_step_limit,
        )


@lru_cache(maxsize=64)
def _one_token_each(sequences: int) -> torch.Tensor:
    return torch.arange(sequences + 1, dtype=torch.int32)
