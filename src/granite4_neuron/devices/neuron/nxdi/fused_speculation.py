"""NxD Inference's fused speculation: a draft model, its drafts' verification and the commit in one graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronFusedSpecModel
from neuronx_distributed_inference.models.model_wrapper import ModelWrapper

from granite4_neuron.devices.neuron.nxdi.config import GraniteMoeHybridInferenceConfig
from granite4_neuron.devices.neuron.nxdi.speculative_model import SpeculativeModel
from granite4_neuron.devices.neuron.nxdi.state import HybridCacheManager, int32_arange
from granite4_neuron.errors import UserError

Outputs = torch.Tensor | list[torch.Tensor]

# Results of the graph: accepted tokens [batch, tokens], padded with -1; the last of them, [batch, 1], which is the next
# step's input; its attention mask; its position, [batch, 1]. Then follow the draft's state and the target's.
NUM_RESULTS = 4


class FusedSpeculationModel(NeuronFusedSpecModel):
    """Two models of this package: a small one drafts and the other verifies.

    The graph computes how many tokens are accepted while it still has both models' recurrent state before the step. It
    advances that state again by the accepted tokens, so it keeps no state per token.

    A sequence ends neuron_config.speculation_length tokens before the cache does. Rows may have prompts of different
    lengths, also with continuous batching. Both models may be hybrids.

    A row's position decides which entries its drafts attend to. NxD Inference has one mask for the drafts of all rows,
    which is wrong if rows have different lengths.
    """

    def __init__(self, config: GraniteMoeHybridInferenceConfig):
        parallel_state.initialize_speculative_draft_group(config.fused_spec_config.draft_config.neuron_config.tp_degree)
        super().__init__(config)
        self.draft_model.keeps_inputs = True

    def _token_gen_forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        seq_ids: torch.Tensor,
        sampling_params: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> list[torch.Tensor]:
        """Return drafts [batch, tokens - 1], the target's choices after the last token and after each draft [batch,
        tokens], and all states; recurrent ones have not yet been advanced by the accepted tokens.

        The draft model also runs its last draft, because all drafts may be accepted; its output is not used.
        """
        tokens = [input_ids]
        states: list[torch.Tensor] = []
        draft_inputs: list[Sequence[torch.Tensor]] = []
        positions = int32_arange(attention_mask.shape[1], position_ids)
        for _ in range(self.neuron_config.speculation_length):
            place = position_ids + len(draft_inputs)
            before = (positions < place).to(attention_mask.dtype)
            token, *states = self.draft_model(
                tokens[-1], before, place, seq_ids, sampling_params, kv_cache=states or None
            )
            tokens.append(token.view(-1, 1).to(input_ids.dtype))
            draft_inputs.append(self.draft_model.kept_inputs)
        self._draft_inputs = [torch.cat(layer_inputs, dim=1) for layer_inputs in zip(*draft_inputs, strict=True)]
        self._is_there = seq_ids >= 0

        candidates = torch.cat(tokens[:-1], dim=1)
        places = position_ids + int32_arange(candidates.shape[1], position_ids)
        chosen, *target_states = self.target_model(candidates, attention_mask, places, seq_ids, sampling_params)
        return [candidates[:, 1:], chosen, *states, *target_states]

    def _tkg_postprocessor(
        self, token_gen_outs: list[torch.Tensor], attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the graph's results; recurrent state in `token_gen_outs` is advanced by the accepted tokens.

        The choice is greedy: the target's tokens while the drafts equal them, and the next one.
        """
        drafted, chosen = token_gen_outs[:2]
        stands = torch.ones_like(position_ids[:, 0], dtype=torch.bool)
        accepted = torch.ones_like(position_ids[:, 0])
        for place in range(drafted.shape[1]):
            stands = stands & (drafted[:, place] == chosen[:, place])
            accepted = accepted + stands.to(accepted.dtype)

        places = int32_arange(chosen.shape[1], position_ids)
        tokens = chosen.where(places < accepted[:, None], self.acceptance_padding_token).to(torch.int32)
        last = chosen.masked_fill(places != accepted[:, None] - 1, 0).sum(1, keepdim=True, dtype=torch.int32)
        next_position = (position_ids + accepted[:, None]).to(torch.int32)
        positions = int32_arange(attention_mask.shape[1], position_ids)
        next_mask = (positions < next_position).to(position_ids.dtype)

        accepted = accepted.where(self._is_there, 0)
        first = 2
        for model, inputs in (
            (self.draft_model, self._draft_inputs),
            (self.target_model, self.target_model.kept_inputs),
        ):
            self._commit(model, inputs, position_ids, accepted, token_gen_outs, first)
            first += 2 * len(model.layers)
        return [tokens, last, next_mask, next_position]

    @staticmethod
    def _commit(
        model: SpeculativeModel,
        inputs: Sequence[torch.Tensor],
        position_ids: torch.Tensor,
        accepted: torch.Tensor,
        outputs: list[torch.Tensor],
        first: int,
    ) -> None:
        """Replace the recurrent state in `outputs` by the state after the accepted tokens; the model's states begin at
        `first`."""
        new = iter(model.advance(inputs, position_ids, accepted))
        for idx, _ in model.mamba_layers():
            outputs[first + 2 * idx] = next(new)
            outputs[first + 2 * idx + 1] = next(new)


class FusedSpeculation(NeuronBaseForCausalLM):
    """The parts of an application of NxD Inference that differ with fused speculation."""

    def checkpoint_loader_fn(self, mmap: bool = False) -> dict:
        """Return the weights; with fused speculation those of both models."""
        try:
            return super().checkpoint_loader_fn(mmap)
        finally:
            if "_FUSED_PREFIX" in vars(type(self)):
                del type(self)._FUSED_PREFIX  # set on the class, and every later model would inherit it

    @classmethod
    def validate_config(cls, config: GraniteMoeHybridInferenceConfig) -> None:
        """Check the parts of a config that depend on the draft model's config.

        Raises:
            UserError: fused speculation has no draft model, or its config does not fit the model's.
        """
        super().validate_config(config)
        neuron_config = config.neuron_config
        if not neuron_config.enable_fused_speculation:
            return
        if config.fused_spec_config is None:
            raise UserError(
                "neuron_config.enable_fused_speculation needs config.fused_spec_config, with a draft model."
            )
        worker_cls = config.fused_spec_config.worker_cls
        if not issubclass(worker_cls, SpeculativeModel):
            raise UserError(
                f"config.fused_spec_config.worker_cls is {worker_cls.__name__}; it must be SpeculativeModel."
            )
        draft = config.fused_spec_config.draft_config
        if not isinstance(draft, GraniteMoeHybridInferenceConfig):
            raise UserError(f"the draft model's config is a {type(draft).__name__}; it must be of this package, too.")
        if draft.vocab_size != config.vocab_size:
            raise UserError(
                f"the draft model has a vocabulary of {draft.vocab_size:,} tokens and the model one of "
                f"{config.vocab_size:,}; they must have the same."
            )
        for name in ("tp_degree", "max_batch_size", "seq_len", "max_context_length", "is_continuous_batching"):
            ours, its = getattr(neuron_config, name), getattr(draft.neuron_config, name)
            if ours != its:
                raise UserError(
                    f"neuron_config.{name} is {ours} and the draft model's is {its}; they must be the same."
                )
        if draft.neuron_config.on_device_sampling_config is None or draft.neuron_config.speculation_length:
            raise UserError("the draft model needs on_device_sampling_config, and no speculation_length.")

    def get_generation_model(self) -> ModelWrapper:
        if self.neuron_config.enable_fused_speculation:
            return self.fused_spec_model
        return super().get_generation_model()

    def enable_context_encoding(self, **model_init_kwargs: object) -> None:
        if self.neuron_config.enable_fused_speculation:
            self._model_cls = FusedSpeculationModel
        super().enable_context_encoding(**model_init_kwargs)

    def _prefill_one_by_one(self, per_row: tuple[torch.Tensor, ...], rest: tuple, kwargs: dict) -> tuple[Outputs, bool]:
        """Prefill each row alone, for graphs with several results; NxD Inference does so only for one result."""
        results = []
        for row in zip(*(tensor.split(1) for tensor in per_row), strict=True):
            outputs, is_run_on_neuron = self._get_model_outputs(*row, *rest, **kwargs)
            row_results, state = self._results_and_state(outputs)
            self._copy_past_key_values([*row_results, *state])
            results.append(row_results)
        results = [torch.cat(parts) for parts in zip(*results, strict=True)]
        return self._outputs(results, state, is_run_on_neuron), is_run_on_neuron

    def _decode_all_slots(self, per_row: tuple[torch.Tensor, ...], rest: tuple, kwargs: dict) -> tuple[Outputs, bool]:
        """Like `_decode`, for a graph with several results; NxD Inference fills a batch only for graphs with one."""
        *_, seq_ids, _ = per_row
        slots = torch.arange(self.neuron_config.max_batch_size)
        row_indices = torch.zeros_like(slots)
        row_indices[seq_ids.long()] = torch.arange(len(seq_ids))
        is_there = torch.isin(slots, seq_ids)
        input_ids, attention_mask, position_ids, _, sampling_params = (tensor[row_indices] for tensor in per_row)
        full = (input_ids, attention_mask, position_ids, slots.where(is_there, -1), sampling_params)
        outputs, is_run_on_neuron = super()._get_model_outputs(*full, *rest, **kwargs)
        results, state = self._results_and_state(outputs)
        return self._outputs([result[seq_ids.long()] for result in results], state, is_run_on_neuron), is_run_on_neuron

    def _get_constructed_outputs(self, outputs: Outputs, is_run_on_neuron: bool) -> object:
        if self.neuron_config.enable_fused_speculation:
            return self._construct_output(outputs[:NUM_RESULTS])
        return super()._get_constructed_outputs(outputs, is_run_on_neuron)


def cache_managers(model: SpeculativeModel | FusedSpeculationModel) -> list[HybridCacheManager]:
    """Return the cache managers of a graph's model, or of fused speculation's two, in the order of its outputs."""
    models = (model.draft_model, model.target_model) if isinstance(model, FusedSpeculationModel) else (model,)
    return [each.kv_mgr for each in models]
