"""The model as an application of NxD Inference: compile, load, generate."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from neuronx_distributed.utils.tensor_capture import enable_tensor_capture
from neuronx_distributed_inference.models.config import MoENeuronConfig
from neuronx_distributed_inference.models.model_wrapper import (
    CONTEXT_ENCODING_MODEL_TAG,
    ModelWrapper,
)
from neuronx_distributed_inference.modules.autobucketing import generate_buckets_for_tkg
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from granite4_neuron.checkpoint.folder import FolderCheckpoint
from granite4_neuron.devices.neuron.compiled_graphs import continuation_tokens, prompt_pieces
from granite4_neuron.devices.neuron.nxdi.checkpoint import convert
from granite4_neuron.devices.neuron.nxdi.config import GraniteMoeHybridInferenceConfig
from granite4_neuron.devices.neuron.nxdi.fused_speculation import NUM_RESULTS, FusedSpeculation, Outputs, cache_managers
from granite4_neuron.devices.neuron.nxdi.slot_graphs import SlotOperations
from granite4_neuron.devices.neuron.nxdi.speculative_model import SpeculativeModel

CONTINUATION_MODEL_TAG = "prefill_continuation_model"


class NeuronModelWrapper(ModelWrapper):
    """One kind of graph, in all its buckets."""

    def _get_seq_bucket(self, buckets: list[int], input_len: int, speculation_length: int, strategy: str) -> int:
        """Return the smallest bucket that holds a prompt. NxD Inference would take the next larger one for a full
        bucket.
        """
        if self.tag in (CONTEXT_ENCODING_MODEL_TAG, CONTINUATION_MODEL_TAG) and input_len in buckets:
            return input_len
        return super()._get_seq_bucket(buckets, input_len, speculation_length, strategy)


class NeuronGraniteMoeHybridForCausalLM(FusedSpeculation, SlotOperations):
    """A Granite 4 hybrid for NxD Inference.

    Besides the graphs for context encoding and token generation it has continuation graphs for the further tokens of a
    prompt that is longer than the largest context encoding bucket. So a prompt may be as long as neuron_config.seq_len.
    tensor_capture_config captures the last step of such a prompt.

    With continuous batching a sequence can be copied to another slot and continued there. With
    neuron_config.speculation_length, that many tokens of each sequence can be verified and the accepted ones committed.
    See `extend`, `verify`, `commit` and `copy`.

    Always pass the attention mask. Without it NxD Inference derives one from the positions, and if padding has position
    1, a prompt of one token looks like one of two.
    """

    _model_cls = SpeculativeModel
    neuron_config: MoENeuronConfig

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prefill_continuation_model: NeuronModelWrapper | None = None
        tokens = continuation_tokens(self._context_buckets)
        shortest = tokens if self.neuron_config.is_continuous_batching else self._context_buckets[-1]
        if shortest < self.neuron_config.max_length:
            self.enable_prefill_continuation(tokens, shortest)
        if self.neuron_config.is_continuous_batching and not self.neuron_config.enable_fused_speculation:
            self.enable_copy()

    @property
    def _context_buckets(self) -> list[int]:
        """The numbers of tokens that the graphs for context encoding take, ascending."""
        return self.context_encoding_model.neuron_config.buckets

    @property
    def _num_results(self) -> int:
        """The number of a graph's outputs for the caller: tokens or logits or both, and the captured tensors."""
        if self.neuron_config.enable_fused_speculation:
            return NUM_RESULTS
        return (2 if self.neuron_config.output_logits else 1) + self._get_captured_tensors_offset()

    def to_cpu(self) -> None:
        """Load the weights and run on the CPU. tensor_capture_config applies there as well."""
        # NxD Inference refuses verification in this mode; this class runs it itself.
        neuron_config = self.neuron_config
        self.neuron_config = copy.copy(neuron_config)
        self.neuron_config.speculation_length = 0
        super().to_cpu()
        self.neuron_config = neuron_config
        for managers in zip(*(cache_managers(model.model) for model in self.models), strict=True):
            for manager in managers:
                manager.past_key_values = managers[0].past_key_values
        wanted = self.neuron_config.tensor_capture_config
        if wanted:
            for module in dict.fromkeys(model.model for model in self.models):  # graphs may share a module
                enable_tensor_capture(
                    module, wanted.modules_to_capture, wanted.max_intermediate_tensors, wanted.capture_inputs
                )

    def get_model_wrapper_cls(self) -> type[NeuronModelWrapper]:
        return NeuronModelWrapper

    def enable_prefill_continuation(self, tokens: int, shortest: int) -> None:
        """Add the graphs for further tokens of a prompt, one for each bucket of the cache that is above `shortest`.

        Args:
            tokens: how many tokens such a graph takes.
        """
        config = copy.deepcopy(self.config)
        neuron_config = config.neuron_config
        neuron_config.batch_size = neuron_config.ctx_batch_size
        if neuron_config.enable_fused_speculation:
            config.fused_spec_config.draft_config.neuron_config.batch_size = neuron_config.ctx_batch_size
        neuron_config.n_active_tokens = tokens
        neuron_config.bucket_n_active_tokens = False
        neuron_config.is_prefill_stage = True
        neuron_config.allow_input_truncation = False  # it would cut a prompt's tokens and its mask at different lengths
        neuron_config.buckets = [size for size in generate_buckets_for_tkg(config) if size > shortest]
        graph = self.model_wrapper(
            config=config,
            model_cls=self._model_cls,
            tag=CONTINUATION_MODEL_TAG,
            compiler_args=self.get_compiler_args(),
        )
        # Compiled like context encoding: many tokens, little reuse between steps.
        graph.compiler_args = self.context_encoding_model.compiler_args
        self.prefill_continuation_model = graph
        self.models.append(graph)

    def _get_model_outputs(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        seq_ids: torch.Tensor,
        sampling_params: torch.Tensor,
        prev_hidden: torch.Tensor | None,
        adapter_ids: torch.Tensor | None,
        *args,
        **kwargs,
    ) -> tuple[Outputs, bool]:
        """Return the outputs of a step, which may take several graphs, and whether it ran on a device.

        On a device NxD finds a graph by the shapes of all inputs, also of those that it does not use. If a caller gives
        no sampling_params, NxD Inference passes those of a full batch.
        """
        per_row = (input_ids, attention_mask, position_ids, seq_ids, sampling_params[: len(input_ids)])
        rest = (prev_hidden, adapter_ids, *args)
        if not self._is_prefill(position_ids):
            return self._decode(per_row, rest, kwargs)
        if self.neuron_config.enable_fused_speculation and len(input_ids) > self.neuron_config.ctx_batch_size:
            return self._prefill_one_by_one(per_row, rest, kwargs)
        if input_ids.shape[1] <= self._context_buckets[-1] or self.prefill_continuation_model is None:
            return super()._get_model_outputs(*per_row, *rest, **kwargs)
        return self._prefill_in_pieces(per_row, rest, kwargs)

    def _decode(self, per_row: tuple[torch.Tensor, ...], rest: tuple, kwargs: dict) -> tuple[Outputs, bool]:
        """Decode one token per row. The rows of a full batch are sorted by slot, as the graph expects them."""
        input_ids, attention_mask, _, seq_ids, sampling_params = per_row
        # The generation adapter counts from the largest position of a padded prompt, which is 1 for a prompt of one
        # token.
        position_ids = attention_mask.sum(1, keepdim=True)
        per_row = (input_ids, attention_mask, position_ids, seq_ids, sampling_params)
        order = seq_ids.argsort()
        if not self.neuron_config.is_continuous_batching:
            return super()._get_model_outputs(*per_row, *rest, **kwargs)
        if self.neuron_config.enable_fused_speculation:
            return self._decode_all_slots(per_row, rest, kwargs)
        if torch.equal(order, torch.arange(len(order))):
            return super()._get_model_outputs(*per_row, *rest, **kwargs)
        outputs, is_run_on_neuron = super()._get_model_outputs(*(tensor[order] for tensor in per_row), *rest, **kwargs)
        results, state = self._results_and_state(outputs)
        # A captured tensor may not have one row per sequence.
        results = [result[order.argsort()] if len(result) == len(order) else result for result in results]
        return self._outputs(results, state, is_run_on_neuron), is_run_on_neuron

    def _prefill_in_pieces(self, per_row: tuple[torch.Tensor, ...], rest: tuple, kwargs: dict) -> tuple[Outputs, bool]:
        """Run context encoding for a prompt's first tokens and continuations for the others."""
        input_ids, attention_mask, position_ids, seq_ids, sampling_params = per_row
        encoded, *_ = prompt_pieces(0, input_ids.shape[1], self._context_buckets)
        first = (
            *(tensor[:, :encoded] for tensor in (input_ids, attention_mask, position_ids)),
            seq_ids,
            sampling_params,
        )
        outputs, is_run_on_neuron = super()._get_model_outputs(*first, *rest, **kwargs)
        results, state = self._results_and_state(outputs)
        self._copy_past_key_values([*results, *state])
        per_row = (input_ids, attention_mask, seq_ids, sampling_params)
        return self._continue(per_row, rest, encoded, results), is_run_on_neuron

    def _continue(
        self, per_row: tuple[torch.Tensor, ...], rest: tuple, first: int, results: Sequence[torch.Tensor] = ()
    ) -> Outputs:
        """Continue prompts from their position `first` on.

        Args:
            per_row: input_ids, attention_mask, seq_ids and sampling_params.
            results: of the earlier steps, for rows that end there; none if no row does.
        """
        input_ids, attention_mask, seq_ids, sampling_params = per_row
        graph, lengths = self.prefill_continuation_model, attention_mask.sum(1)
        assert graph is not None  # the model was compiled for prompts longer than context encoding takes
        pieces = prompt_pieces(first, input_ids.shape[1], self._context_buckets)
        for start, tokens in zip(itertools.accumulate(pieces[:-1], initial=first), pieces, strict=True):
            piece = input_ids[:, start : start + tokens]
            outputs = graph(
                F.pad(piece, (0, tokens - piece.shape[1])),
                attention_mask[:, : start + tokens],
                torch.arange(start, start + tokens).expand(len(piece), -1),
                seq_ids,
                sampling_params,
                *rest[:2],
            )
            new_results, state = self._results_and_state(outputs)
            self._copy_past_key_values([*new_results, *state])
            # A row that ended in an earlier piece keeps its token and logits. Captured tensors are the last piece's.
            for index, old in enumerate(results[: self._num_results - self._get_captured_tensors_offset()]):
                is_new = (lengths > start).view(-1, *[1] * (old.dim() - 1))
                new_results[index] = new_results[index].where(is_new, old)
            results = new_results
        return self._outputs(results, state, graph.is_neuron())

    def extend(self, tokens: torch.Tensor, start: int, slot: int) -> torch.Tensor:
        """Add tokens to a sequence that has begun, in the pieces of continuation graphs.

        Args:
            tokens: [n], int64, the sequence's tokens from position `start` on.
            slot: the sequence's slot, counted from 0.

        Returns:
            Logits after the last of them, [1, vocab_size].
        """
        input_ids = F.pad(tokens, (start, 0))[None]
        mask, seq_ids = torch.ones_like(input_ids), torch.tensor([slot])
        per_row = (input_ids, mask, seq_ids, self.default_sampling_params[:1])
        outputs = self._continue(per_row, (None, None), start)
        return (outputs if torch.is_tensor(outputs) else outputs[0])[:, -1]

    def _results_and_state(self, outputs: Outputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Split a graph's outputs. On a device a single result comes without a list, and no state is returned."""
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        return outputs[: self._num_results], outputs[self._num_results :]

    def _outputs(self, results: Sequence[torch.Tensor], state: list[torch.Tensor], is_run_on_neuron: bool) -> Outputs:
        return results[0] if is_run_on_neuron and self._num_results == 1 else [*results, *state]

    def _copy_past_key_values(self, outputs: list[torch.Tensor]) -> None:
        """Assign the state that a graph returns in CPU mode, so that all kinds of graphs find it."""
        if not self.models[0].is_neuron():
            managers = cache_managers(self.models[0].model)
            states = [state for manager in managers for state in manager.past_key_values]
            for parameter, new in zip(states, outputs[self._num_results :], strict=True):
                parameter.data = new

    def _infer_attention_mask(self, position_ids: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Return the mask [batch, n] for callers that pass none, such as vLLM, from position_ids [batch, tokens]."""
        if position_ids.shape[1] == 1 and self._is_prefill(position_ids):
            # Prompts of one token. NxD Inference treats them as decode, whose mask has the tokens before this one.
            return torch.ones_like(position_ids)
        return super()._infer_attention_mask(position_ids, *args, **kwargs)

    @classmethod
    def get_config_cls(cls) -> type[GraniteMoeHybridInferenceConfig]:
        return GraniteMoeHybridInferenceConfig

    @classmethod
    def get_state_dict(cls, model_name_or_path: str, config: GraniteMoeHybridInferenceConfig) -> dict:
        """Return weights under the traced model's names.

        Raises:
            UserError: they do not fit the config. NxD Inference itself would leave missing weights uninitialised.
        """
        FolderCheckpoint(Path(model_name_or_path)).check_plain(config.granite)
        return super().get_state_dict(model_name_or_path, config)

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict: dict, config: GraniteMoeHybridInferenceConfig) -> dict:
        return convert(state_dict, config)

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: dict) -> None:
        state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()

    @staticmethod
    def load_hf_model(model_path: str, **kwargs) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(model_path, **kwargs)
