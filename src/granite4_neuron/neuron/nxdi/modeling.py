"""The model that NxD Inference traces: embedding, attention, experts and head are its own, the other layers ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from neuronx_distributed.utils.tensor_capture.registry import TensorRegistry
from neuronx_distributed_inference.models.model_base import NeuronBaseModel
from neuronx_distributed_inference.modules.generation.sampling import create_sampler
from torch import nn

from granite4_neuron.config import MAMBA
from granite4_neuron.model.binding import use
from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.model.modeling_granite_moe_hybrid import DecoderLayer
from granite4_neuron.model.norm import RMSNorm
from granite4_neuron.neuron.nxdi.attention import NeuronAttention
from granite4_neuron.neuron.nxdi.config import GraniteMoeHybridInferenceConfig
from granite4_neuron.neuron.nxdi.feed_forward import NeuronExperts, NeuronSharedMLP
from granite4_neuron.neuron.nxdi.parallel import NeuronParallel, split_over_ranks
from granite4_neuron.neuron.nxdi.state import HybridCacheManager, NeuronStep, int32_arange


class NeuronGraniteMoeHybridModel(NeuronBaseModel):
    """One step of a rank. The shapes of input_ids [batch, tokens] and attention_mask [batch, n] tell which kind:

    * context encoding, tokens == n: the first tokens of sequences. The mask has ones for real tokens.
    * continuation, 1 < tokens < n: further tokens of prompts, which also attend to the cache. The mask has ones for all
      tokens of a sequence up to the step's last real one.
    * verification, tokens == neuron_config.speculation_length < n: drafts of sequences that have begun. Recurrent state
      is not changed, and `kept_inputs` has the inputs of `advance`. The mask has ones for the tokens before the step.
    * token generation, tokens == 1: the mask has ones for the tokens before this one.

    keeps_inputs: whether token generation also fills `kept_inputs`.
    """

    keeps_inputs = False
    kept_inputs: Sequence[torch.Tensor] = ()

    def setup_attr_for_model(self, config: GraniteMoeHybridInferenceConfig) -> None:
        neuron_config = config.neuron_config
        self.on_device_sampling = neuron_config.on_device_sampling_config is not None
        self.tp_degree = neuron_config.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.max_batch_size = neuron_config.max_batch_size
        self.buckets = neuron_config.buckets

    def init_model(self, config: GraniteMoeHybridInferenceConfig) -> None:
        granite, dtype = config.granite, config.neuron_config.torch_dtype
        self.embedding_multiplier = granite.embedding_multiplier
        self.embed_tokens = ParallelEmbedding(
            granite.vocab_size, granite.hidden_size, dtype=dtype, shard_across_embedding=True, pad=True
        )
        self.layers = nn.ModuleList(NeuronDecoderLayer(config, kind) for kind in granite.layer_types)
        self.norm = RMSNorm(granite.hidden_size, granite.rms_norm_eps).to(dtype)
        self.lm_head = _ScaledHead(config, gather_output=not self.on_device_sampling)

    def init_inference_optimization(self, config: GraniteMoeHybridInferenceConfig) -> None:
        if self.on_device_sampling:
            self.sampler = create_sampler(config.neuron_config)
        self.kv_mgr = HybridCacheManager(config, self.num_key_value_heads, self.rank_util)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        seq_ids: torch.Tensor,
        sampling_params: torch.Tensor,
        *args: torch.Tensor,
        **kwargs: object,
    ) -> list[torch.Tensor]:
        """Implement NeuronBaseModel.forward: the tokens or logits, and the new value of each state tensor."""
        self.n_positions = attention_mask.shape[-1]  # a bucket's; in CPU mode NxD Inference does not set it
        end = self._end(input_ids, attention_mask)
        position_ids = _positions(input_ids, end, position_ids, seq_ids)
        return super().forward(input_ids, attention_mask, position_ids, seq_ids, sampling_params, *args, **kwargs)

    def advance(
        self, kept_inputs: Sequence[torch.Tensor], position_ids: torch.Tensor, accepted: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the recurrent state after the first tokens of a verification, by a masked replay.

        Args:
            kept_inputs: of each Mamba layer, [slots, tokens, conv_dim + num_heads].
            position_ids: [slots, 1], of that step's first tokens.
            accepted: [slots], 0 to tokens; tokens after these have dt = 0 and do not change the state.

        Returns:
            conv_state and ssm_state of each Mamba layer.
        """
        if not kept_inputs:
            return []
        positions = position_ids.int() + int32_arange(kept_inputs[0].shape[1], position_ids)
        slots = int32_arange(len(accepted), position_ids)
        step = NeuronStep(positions, accepted.int(), slots, self.n_positions, None, has_begun=True)
        new = []
        for (idx, layer), inputs in zip(self.mamba_layers(), kept_inputs, strict=True):
            state = self.kv_mgr.mamba_state(idx)
            layer.mamba.advance(inputs, step, state)
            new += [state.conv_state, state.ssm_state]
        return new

    def mamba_layers(self) -> Iterator[tuple[int, NeuronDecoderLayer]]:
        """Return each Mamba layer with its index among all layers."""
        return ((idx, layer) for idx, layer in enumerate(self.layers) if layer.is_mamba)

    def _is_context_encoding(self, input_ids: torch.Tensor) -> bool:
        return 1 < input_ids.shape[-1] == self.n_positions

    def _is_for_speculation(self, input_ids: torch.Tensor) -> bool:
        return 1 < input_ids.shape[-1] == self.speculation_length < self.n_positions

    def _end(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return [batch, 1], the position after each row's last real token; the cache's end if the mask has none."""
        if input_ids.shape[1] == 1 or self._is_for_speculation(input_ids):
            return torch.full_like(attention_mask[:, :1], self.max_length)
        return attention_mask.sum(1, keepdim=True, dtype=torch.int32)

    def create_attn_mask(
        self,
        attention_mask: torch.Tensor,
        is_for_context_encoding: bool,
        is_for_speculation: bool,
        position_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Make the mask, [batch, 1, tokens, n], bool: over the step for context encoding, over the cache otherwise."""
        tokens = position_ids.shape[1]
        if is_for_context_encoding or tokens == 1:
            return super().create_attn_mask(attention_mask, is_for_context_encoding, is_for_speculation, position_ids)
        before = int32_arange(self.n_positions, position_ids) < position_ids[:, :1]
        return before[:, None, None].expand(-1, 1, tokens, -1)

    def get_model_output(
        self, input_ids: torch.Tensor, seq_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return final hidden states of rows' last tokens [batch, 1, hidden_size], and each state tensor's new value.

        A verification returns the hidden states of all tokens, [batch, tokens, hidden_size].
        """
        lengths = (position_ids >= 0).int().sum(1, dtype=torch.int32)  # torch_xla sums booleans in int64
        slots = seq_ids.int()
        sequences = None if len(slots) == self.kv_mgr.num_slots else slots
        verifies = self._is_for_speculation(input_ids)
        self.kept_inputs = []
        step = NeuronStep(
            position_ids.int(),
            lengths,
            slots,
            self.n_positions,
            sequences,
            verifies=verifies,
            has_begun=verifies,
            journal=self.kept_inputs if verifies or self.keeps_inputs else None,
        )
        if step.is_continuation:
            tokens = position_ids.shape[1]
            kwargs["active_mask"] = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=input_ids.device).tril()
        # The residual stream is float32 for weights of any dtype: in bfloat16 it would be the largest error.
        hidden_states = self.embed_tokens(input_ids).float() * self.embedding_multiplier
        # Padding enters as zeros, and so it is finite in every layer.
        kwargs["inputs_embeds"] = hidden_states.masked_fill(~step.is_real[..., None], 0.0)
        hidden_states, state = super().get_model_output(
            input_ids, seq_ids, position_ids=position_ids, step=step, **kwargs
        )
        # Selected by a mask instead of an index, which suits a compiler for static shapes.
        self.sliced_hidden = True
        if verifies:
            return hidden_states, state
        return hidden_states.masked_fill(~step.is_last[..., None], 0.0).sum(1, keepdim=True), state

    def _sample_on_device(
        self,
        logits: torch.Tensor,
        sampling_params: torch.Tensor,
        is_for_speculation: bool,
        is_for_context_encoding: bool,
    ) -> torch.Tensor:
        """Return tokens [batch, 1]; for a verification the greedy tokens after each token, [batch, tokens]."""
        if not is_for_speculation:
            return super()._sample_on_device(logits, sampling_params, is_for_speculation, is_for_context_encoding)
        tokens = self.sampler(logits.flatten(0, 1), sampling_params, rank_id=self.rank_util.get_rank())
        return tokens.view(logits.shape[:2]).to(torch.int32)

    def _get_captured_tensors(self, device: torch.device) -> list[torch.Tensor]:
        """Return the tensors that tensor_capture_config names."""
        captured = super()._get_captured_tensors(device)
        # The call above cleared the names in the registry, but the next step or graph needs them again.
        wanted = self.neuron_config.tensor_capture_config
        TensorRegistry.get_instance().configure(
            True, wanted.modules_to_capture, wanted.max_intermediate_tensors, wanted.capture_inputs
        )
        return captured


class NeuronDecoderLayer(DecoderLayer):
    """`DecoderLayer` with NxD Inference's attention and experts, called as NxD Inference calls a layer."""

    def __init__(self, config: GraniteMoeHybridInferenceConfig, layer_type: str):
        granite, degree, dtype = config.granite, config.neuron_config.tp_degree, config.neuron_config.torch_dtype
        parallel, is_mamba = NeuronParallel(degree=degree), layer_type == MAMBA
        mixer = Mamba2(granite, parallel).to(dtype) if is_mamba else NeuronAttention(config)
        mlp = NeuronSharedMLP(granite, parallel).to(dtype)
        experts = NeuronExperts(config) if granite.num_local_experts else None
        super().__init__(granite, mixer, mlp, experts)
        self.parallel = parallel
        self.input_layernorm.to(dtype)
        self.post_attention_layernorm.to(dtype)
        if is_mamba:
            use(mixer, config.operators)
            split_over_ranks(mixer, "mamba", granite, degree)
        split_over_ranks(mlp, "shared_mlp", granite, degree)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        step: NeuronStep,
        idx: int,
        kv_mgr: HybridCacheManager,
        cos_cache: torch.Tensor | None,
        sin_cache: torch.Tensor | None,
        **attention_arguments,
    ) -> tuple:
        """Return hidden states, new state (key and value of the batch's rows only), rotary tables, no residual."""
        if not self.is_mamba:
            call = _AttentionCall(attention_arguments, cos_cache, sin_cache)
            hidden_states, _ = super().forward(hidden_states, step, call, None)
            return hidden_states, call.new, call.cos_cache, call.sin_cache, None
        state = kv_mgr.mamba_state(idx, attention_arguments.get("kvcache_buffer"))
        hidden_states, inputs = super().forward(hidden_states, step, state, None)
        if step.journal is not None:
            step.journal.append(inputs)
        return hidden_states, (state.conv_state, state.ssm_state), cos_cache, sin_cache, None

    def attend(self, x: torch.Tensor, step: NeuronStep, call: _AttentionCall, rotary: None) -> torch.Tensor:
        mixed, call.new, call.cos_cache, call.sin_cache = self.self_attn(
            x, cos_cache=call.cos_cache, sin_cache=call.sin_cache, **call.arguments
        )
        return mixed

    def feed_forward(self, x: torch.Tensor, step: NeuronStep) -> Iterator[torch.Tensor]:
        """Compute MLP and experts together, because the ranks add both in one message."""
        partial = self.shared_mlp(x)
        if self.block_sparse_moe is not None:
            partial = partial + self.block_sparse_moe(x, step.is_real)
        yield self.parallel.all_reduce(partial)


@dataclass
class _AttentionCall:
    """Further arguments and results of NxD Inference's attention, beside hidden states.

    arguments: named as it has them. new: keys and values of the batch's rows.
    """

    arguments: Mapping[str, object]
    cos_cache: torch.Tensor | None
    sin_cache: torch.Tensor | None
    new: tuple[torch.Tensor, torch.Tensor] | None = None


class _ScaledHead(ColumnParallelLinear):
    """The language model head; logits in float32, divided by the config's logits_scaling."""

    def __init__(self, config: GraniteMoeHybridInferenceConfig, gather_output: bool):
        granite, dtype = config.granite, config.neuron_config.torch_dtype
        super().__init__(granite.hidden_size, granite.vocab_size, bias=False, gather_output=gather_output, dtype=dtype)
        self.logits_scaling = granite.logits_scaling

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states).float() / self.logits_scaling


def _positions(
    input_ids: torch.Tensor, end: torch.Tensor, position_ids: torch.Tensor, seq_ids: torch.Tensor
) -> torch.Tensor:
    """Return [batch, tokens]: a token's place in its sequence; -1 for padding, and in rows that only fill the batch.

    NxD Inference gives padding the position 1, so that a prompt of one token looks like one of two. The mask tells, by
    `end` [batch, 1].
    """
    position_ids = position_ids[:, :1].int() + int32_arange(input_ids.shape[1], input_ids)
    return position_ids.where((seq_ids[:, None] >= 0) & (position_ids < end), -1)
