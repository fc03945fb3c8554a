"""Additional kinds of graphs for NxD Inference: verify drafts, commit them, copy a slot."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
from neuronx_distributed_inference.models.model_wrapper import (
    SPECULATION_MODEL_TAG,
    DecoderModelInstance,
    ModelWrapper,
)
from neuronx_distributed_inference.modules.autobucketing import generate_buckets_for_tkg
from torch import nn

from granite4_neuron.config import MAMBA
from granite4_neuron.devices.neuron.nxdi.speculative_model import SpeculativeModel
from granite4_neuron.state.hybrid_state import input_output_aliases

COMMIT_MODEL_TAG = "commit_model"
COPY_MODEL_TAG = "copy_model"


class VerificationModel(SpeculativeModel):
    """A verification of all slots, in their order.

    Results: logits [slots, tokens, vocab_size], and the kept inputs of each Mamba layer, [slots, tokens, conv_dim +
    num_heads]. All state tensors follow: keys and values with those of the tokens, recurrent state unchanged. It is a
    result because NxD takes a tensor without an alias for a weight. Whether the compiler accepts such outputs is not
    known.
    """

    @property
    def num_results(self) -> int:
        return 1 + len(list(self.mamba_layers()))

    def written_states(self) -> list[nn.Parameter]:
        return list(self.kv_mgr.past_key_values)

    def forward(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        logits, *states = super().forward(*args, **kwargs)
        return [logits, *self.kept_inputs, *states]


class CommitModel(SpeculativeModel):
    """The recurrent state of all slots after the accepted tokens of a verification.

    Results: each slot's new length, [slots]. The recurrent state tensors follow; keys and values do not change.
    """

    num_results = 1

    def written_states(self) -> list[nn.Parameter]:
        states = self.kv_mgr.past_key_values
        return [states[2 * idx + part] for idx, _ in self.mamba_layers() for part in range(2)]

    def forward(  # type: ignore[override]  # a graph with its own inputs and the same parameters
        self, accepted: torch.Tensor, position_ids: torch.Tensor, *kept_inputs: torch.Tensor
    ) -> list[torch.Tensor]:
        """Take the arguments of `SpeculativeModel.advance` in another order."""
        return [position_ids[:, 0] + accepted, *self.advance(kept_inputs, position_ids, accepted)]


class CopyModel(SpeculativeModel):
    """Copies a slot to another one.

    Results: the source, [1]. All state tensors follow.
    """

    num_results = 1

    def written_states(self) -> list[nn.Parameter]:
        return list(self.kv_mgr.past_key_values)

    def forward(  # type: ignore[override]  # as in `CommitModel`
        self, slots: torch.Tensor
    ) -> list[torch.Tensor]:
        """Copy a slot; slots: [2], source and destination."""
        source, destination = slots[:1], slots[1:]
        copied = [
            state.index_put((destination,), state.index_select(0, source)) for state in self.kv_mgr.past_key_values
        ]
        return [source, *copied]


SlotModel = VerificationModel | CommitModel | CopyModel
# An input or a result of a graph: one tensor for all ranks, or one per rank.
RankedTensor = torch.Tensor | Sequence[torch.Tensor]


class SlotGraph(ModelWrapper):
    """One of these kinds of graphs. The caller passes rows for all slots, in order.

    On a device, results stay there and can become inputs of another graph.
    """

    def input_generator(self) -> list[tuple[torch.Tensor, ...]]:
        """Return inputs of each bucket's graph."""
        slots = self.neuron_config.batch_size
        if self.tag == COPY_MODEL_TAG:
            return [(torch.zeros(2, dtype=torch.int32),)]
        if self.tag == COMMIT_MODEL_TAG:
            config, tokens = self.config, self.neuron_config.speculation_length
            dimensions = config.granite.rank_dimensions(self.neuron_config.tp_degree)
            width = dimensions.mamba_conv_dim + dimensions.mamba_heads
            counts = torch.ones(slots, dtype=torch.int32)
            kept = torch.zeros(slots, tokens, width, dtype=self.neuron_config.torch_dtype)
            return [(counts, counts[:, None], *[kept] * config.granite.layer_types.count(MAMBA))]
        return super().input_generator()

    def get_model_instance(self) -> DecoderModelInstance:
        return _SlotModelInstance(model_cls=self.model_cls, config=self.config)

    def _get_seq_bucket(self, buckets: list[int], input_len: int, speculation_length: int, strategy: str) -> int:
        """Return the smallest bucket for the tokens before the step; the step's own tokens need no room in it."""
        return next(bucket for bucket in buckets if bucket >= input_len)

    def run(self, *inputs: RankedTensor) -> list[RankedTensor]:
        """Return the graph's results: in CPU mode tensors, on a device one tensor per rank in a list.

        Args:
            inputs: tensors that are the same for all ranks, or results of another graph.

        In CPU mode this writes the state back; on a device the state is already there.
        """
        if not self.is_neuron():
            outputs = self.model(*inputs)
            for state, new in zip(self.model.written_states(), outputs[self.model.num_results :], strict=True):
                state.data = new
            return outputs[: self.model.num_results]
        ranks = range(self.neuron_config.local_ranks_size)
        rank_inputs = [[value if torch.is_tensor(value) else value[rank] for value in inputs] for rank in ranks]
        return [list(per_rank) for per_rank in zip(*self.model.nxd_model.forward_ranked(rank_inputs), strict=True)]


def to_host(result: RankedTensor) -> torch.Tensor:
    """Return a result of `SlotGraph.run` that is the same on all ranks."""
    return result if torch.is_tensor(result) else result[0].cpu()


class _SlotModelInstance(DecoderModelInstance):
    """The model instance that NxD traces for such a graph."""

    def get(self, bucket_rank: int, **kwargs: object) -> tuple[SlotModel, dict[torch.Tensor, int]]:
        module, _ = super().get(bucket_rank, **kwargs)
        self.input_output_aliases = input_output_aliases(module.written_states(), module.num_results)
        return module, self.input_output_aliases


SLOT_MODELS = {
    SPECULATION_MODEL_TAG: VerificationModel,
    COMMIT_MODEL_TAG: CommitModel,
    COPY_MODEL_TAG: CopyModel,
}


class SlotOperations(NeuronBaseForCausalLM):
    """Operations of an application of NxD Inference on its slots. Slots count from 0.

    copy_model, verification_model, commit_model: the graphs, if the model has them.
    """

    def __init__(self, *args, **kwargs):
        self.copy_model: SlotGraph | None = None
        self.verification_model: SlotGraph | None = None
        self.commit_model: SlotGraph | None = None
        super().__init__(*args, **kwargs)

    def get_generation_model(self) -> ModelWrapper:
        return self.token_generation_model

    def enable_speculation(self) -> None:
        """Add the graphs that verify and commit, and keep those for token generation, which NxD Inference drops."""
        self.enable_token_generation()
        self.verification_model = self._slot_graph(SPECULATION_MODEL_TAG)
        if MAMBA in self.config.granite.layer_types:
            self.commit_model = self._slot_graph(COMMIT_MODEL_TAG)

    def enable_copy(self) -> None:
        """Add the graph that copies a slot, if there are several slots."""
        if self.neuron_config.kv_cache_batch_size > 1:
            self.copy_model = self._slot_graph(COPY_MODEL_TAG)

    def verify(
        self, input_ids: torch.Tensor, starts: torch.Tensor, is_there: torch.Tensor
    ) -> tuple[torch.Tensor, list[Any]]:
        """Return logits after each of some tokens of sequences that have begun, without advancing recurrent state.

        Args:
            input_ids: [slots, tokens], int64, with neuron_config.speculation_length tokens of each slot.
            starts: [slots], int64, each sequence's length so far.
            is_there: [slots], bool; false for slots without a row.

        Returns:
            Logits [slots, tokens, vocab_size], and kept inputs for `commit`.
        """
        graph, slots = self.verification_model, torch.arange(len(starts))
        assert graph is not None  # the model needs a speculation_length
        attention_mask = torch.arange(max(1, int(starts.max()))) < starts[:, None]
        position_ids = starts[:, None] + torch.arange(input_ids.shape[1])
        empty = torch.zeros_like(slots)
        inputs = (input_ids, attention_mask.long(), position_ids, slots.where(is_there, -1))
        inputs = graph.pad_inputs(*inputs, self.default_sampling_params.expand(len(slots), -1), empty, empty)
        logits, *kept_inputs = graph.run(*graph.convert_int64_to_int32(*inputs))
        return to_host(logits), kept_inputs

    def commit(self, kept_inputs: Sequence[RankedTensor], starts: torch.Tensor, accepted: torch.Tensor) -> None:
        """Add the first tokens of a verification to the sequences.

        Args:
            kept_inputs, starts: of that verification.
            accepted: [slots], int64, the number of accepted tokens of each.
        """
        if self.commit_model is not None:
            counts = self.commit_model.convert_int64_to_int32(accepted, starts[:, None])
            self.commit_model.run(*counts, *kept_inputs)

    def copy(self, source: int, destination: int) -> None:
        """Copy a whole slot to another one, on the device."""
        assert self.copy_model is not None  # the model needs several slots
        self.copy_model.run(torch.tensor([source, destination], dtype=torch.int32))

    def _slot_graph(self, tag: str) -> SlotGraph:
        config = copy.deepcopy(self.config)
        neuron_config = config.neuron_config
        neuron_config.batch_size = neuron_config.max_batch_size
        neuron_config.n_active_tokens = neuron_config.speculation_length
        neuron_config.bucket_n_active_tokens = False
        neuron_config.is_prefill_stage = False
        is_one_graph = tag != SPECULATION_MODEL_TAG  # the other graphs do not depend on the cache's length
        neuron_config.buckets = [neuron_config.max_length] if is_one_graph else generate_buckets_for_tkg(config)
        graph = SlotGraph(config=config, model_cls=SLOT_MODELS[tag], tag=tag, compiler_args=self.get_compiler_args())
        self.models.append(graph)
        return graph
