"""The model that NxD Inference traces: embedding, attention, experts and head are its own, the other layers ours.

How state goes through the graphs:

* Which tensors: two for each layer, the parameters `kv_mgr.past_key_values` in the order of the layers (`state.py`).
  Key and value [slots, kv_heads, length, head_dim] of an attention layer; of a Mamba layer conv_state [slots, conv_dim,
  d_conv - 1] and ssm_state [slots, num_heads, head_dim, d_state].
* In and out: a graph reads these parameters and writes none in place. It returns its results (tokens, logits or both,
  captured tensors) and then the new value of every state tensor, in the same order. `NeuronDecoderLayer.forward`
  returns a layer's new pair, and `HybridCacheManager.update_kv_by_layer_id` puts new keys and values into the caches.
* Who makes the aliases: NxD Inference, for its own kinds of graphs. `DecoderModelInstance.get` maps each state
  parameter to the index of its output (`input_output_aliases`), and NxD hands the map to the compiler. For the other
  kinds, which `slot_graphs.py` has, `state.hybrid_state.input_output_aliases` makes the map.
* What is donated: every old value for which the graph returns a new one. Through the alias the new value takes its
  memory, all graphs share the buffers, and no state comes back to the host. In CPU mode the outputs do come back, and
  `NeuronGraniteMoeHybridForCausalLM._copy_past_key_values` assigns them.

| graph | reads | returns new |
|---|---|---|
| context encoding | all state; its own sequences start from zeros | all state |
| continuation, token generation | all state | all state |
| verification | all state | keys and values; recurrent state as it was |
| commit | recurrent state, the kept inputs of a verification | recurrent state |
| copy | all state | all state |
| fused speculation | all state of two models | all state, the recurrent one after the accepted tokens |

The first two rows are here, verification is in `speculative_model.py`, commit and copy in `slot_graphs.py`, and fused
speculation in `fused_speculation.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from neuronx_distributed_inference.models.model_base import NeuronBaseModel
from neuronx_distributed_inference.modules.generation.sampling import create_sampler
from torch import nn

from granite4_neuron.config import MAMBA
from granite4_neuron.devices.neuron.nxdi.attention import NeuronAttention
from granite4_neuron.devices.neuron.nxdi.config import GraniteMoeHybridInferenceConfig
from granite4_neuron.devices.neuron.nxdi.feed_forward import NeuronExperts, NeuronSharedMLP
from granite4_neuron.devices.neuron.nxdi.parallel import NeuronParallel, split_over_ranks
from granite4_neuron.devices.neuron.nxdi.state import HybridCacheManager, NeuronStep, int32_arange
from granite4_neuron.model.attention import RotaryTables
from granite4_neuron.model.binding import set_operators
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.forms import mixer_class
from granite4_neuron.model.norm import norm_of
from granite4_neuron.model.step import Step
from granite4_neuron.state.hybrid_state import LayerState


class NeuronGraniteMoeHybridModel(NeuronBaseModel):
    """One step of a rank. The shapes of input_ids [batch, tokens] and attention_mask [batch, n] decide which kind:

    * context encoding, tokens == n: the first tokens of sequences. The mask has ones for real tokens.
    * continuation, 1 < tokens < n: further tokens of prompts, which also attend to the cache. The mask has ones for all
      tokens of a sequence up to the step's last real one.
    * token generation, tokens == 1: the mask has ones for the tokens before this one.
    """

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
        layers = nn.ModuleList(NeuronDecoderLayer(config, kind) for kind in granite.layer_types)
        self.layers = cast("Sequence[NeuronDecoderLayer]", layers)  # torch's list has no type of its modules
        self.norm = norm_of(granite).to(dtype)
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
        """Return the tokens or logits, and the new value of each state tensor."""
        self.n_positions = attention_mask.shape[-1]  # the bucket's length; in CPU mode NxD Inference does not set it
        end = self._end(input_ids, attention_mask)
        position_ids = _positions(input_ids, end, position_ids, seq_ids)
        return super().forward(input_ids, attention_mask, position_ids, seq_ids, sampling_params, *args, **kwargs)

    def get_model_output(
        self, input_ids: torch.Tensor, seq_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return final hidden states, as `for_head` selects them, and each state tensor's new value."""
        step = self.make_step(position_ids, seq_ids)
        if step.is_continuation:
            tokens = position_ids.shape[1]
            kwargs["active_mask"] = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=input_ids.device).tril()
        # The residual stream is float32 for weights of any dtype: in bfloat16 it would cause the largest error.
        hidden_states = self.embed_tokens(input_ids).float() * self.embedding_multiplier
        # Padding enters as zeros, so it is finite in every layer.
        kwargs["inputs_embeds"] = hidden_states.masked_fill(~step.is_real[..., None], 0.0)
        hidden_states, state = super().get_model_output(
            input_ids, seq_ids, position_ids=position_ids, step=step, **kwargs
        )
        self.sliced_hidden = True  # else NxD Inference selects the last tokens' hidden states itself
        return self.for_head(hidden_states, step), state

    def make_step(self, position_ids: torch.Tensor, seq_ids: torch.Tensor) -> NeuronStep:
        """Return the step that the layers share; position_ids [batch, tokens] are those of `_positions`."""
        return NeuronStep(*self.step_arguments(position_ids, seq_ids))

    def step_arguments(
        self, position_ids: torch.Tensor, seq_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor | None]:
        """Return the positional arguments of a `NeuronStep`."""
        lengths = (position_ids >= 0).int().sum(1, dtype=torch.int32)  # torch_xla sums booleans in int64
        slots = seq_ids.int()
        sequences = None if len(slots) == self.kv_mgr.num_slots else slots
        return position_ids.int(), lengths, slots, self.n_positions, sequences

    def for_head(self, hidden_states: torch.Tensor, step: NeuronStep) -> torch.Tensor:
        """Select the hidden states that the head takes: [batch, tokens, hidden_size] to [batch, 1, hidden_size].

        A mask selects them instead of an index, which suits a compiler for static shapes.
        """
        return hidden_states.masked_fill(~step.is_last[..., None], 0.0).sum(1, keepdim=True)

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

    def _is_context_encoding(self, input_ids: torch.Tensor) -> bool:
        return 1 < input_ids.shape[-1] == self.n_positions

    def _is_for_speculation(self, input_ids: torch.Tensor) -> bool:
        return False

    def _end(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return [batch, 1], the position after each row's last real token.

        For steps whose mask does not have their own tokens it is the end of the cached tokens.
        """
        if input_ids.shape[1] == 1 or self._is_for_speculation(input_ids):
            return torch.full_like(attention_mask[:, :1], self.max_length)
        return attention_mask.sum(1, keepdim=True, dtype=torch.int32)


class NeuronDecoderLayer(DecoderLayer):
    """`DecoderLayer` with NxD Inference's attention and experts, called as NxD Inference calls a layer."""

    def __init__(self, config: GraniteMoeHybridInferenceConfig, layer_type: str):
        granite, degree, dtype = config.granite, config.neuron_config.tp_degree, config.neuron_config.torch_dtype
        parallel, is_mamba = NeuronParallel(degree=degree), layer_type == MAMBA
        mamba = mixer_class(config.operators)
        mixer = mamba(granite, parallel).to(dtype) if is_mamba else NeuronAttention(config)
        mlp = NeuronSharedMLP(granite, parallel, granite.shared_intermediate_size).to(dtype)
        experts = NeuronExperts(config) if granite.num_local_experts else None
        super().__init__(granite, parallel, mixer, mlp, experts)  # type: ignore[arg-type]  # see `feed_forward`
        self.input_layernorm.to(dtype)
        self.post_attention_layernorm.to(dtype)
        if is_mamba:
            set_operators(mixer, config.operators)
            split_over_ranks(mixer, "mamba", granite, degree)
        split_over_ranks(mlp, "shared_mlp", granite, degree)

    def forward(  # type: ignore[override]  # NxD Inference calls a layer with arguments of its own
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
            hidden_states, _ = super().forward(hidden_states, step, call, None)  # type: ignore[arg-type]  # for `mix`
            return hidden_states, call.new, call.cos_cache, call.sin_cache, None
        state = kv_mgr.mamba_state(idx, attention_arguments.get("kvcache_buffer"))
        hidden_states, inputs = super().forward(hidden_states, step, state, None)
        assert inputs is not None  # a Mamba layer returns them
        step.keep(inputs)
        return hidden_states, (state.conv_state, state.ssm_state), cos_cache, sin_cache, None

    def mix(
        self,
        x: torch.Tensor,
        step: Step,
        state: LayerState | _AttentionCall,
        rotary: RotaryTables | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call NxD Inference's attention with its arguments, or this package's Mamba layer."""
        if not isinstance(state, _AttentionCall):
            return super().mix(x, step, state, rotary)
        mixed, state.new, state.cos_cache, state.sin_cache = self.self_attn(
            x, cos_cache=state.cos_cache, sin_cache=state.sin_cache, **state.arguments
        )
        return mixed, None

    def feed_forward(self, x: torch.Tensor, step: Step) -> Iterator[torch.Tensor]:
        """Compute MLP and experts together, because the ranks add both in one all-reduce."""
        partial = self.shared_mlp(x)
        if self.block_sparse_moe is not None:
            partial = partial + self.block_sparse_moe(x, step.is_real)
        yield self.parallel.all_reduce(partial)


@dataclass
class _AttentionCall:
    """Further arguments and results of NxD Inference's attention, besides hidden states.

    arguments: by NxD Inference's names. new: keys and values of the batch's rows.
    """

    arguments: Mapping[str, Any]
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
    """Return [batch, tokens]: each token's position in its sequence; -1 for padding and in rows that only fill the
    batch.

    NxD Inference gives padding the position 1, so a prompt of one token looks like one of two. `end` [batch, 1], from
    the mask, tells them apart.
    """
    position_ids = position_ids[:, :1].int() + int32_arange(input_ids.shape[1], input_ids)
    return position_ids.where((seq_ids[:, None] >= 0) & (position_ids < end), -1)
