"""Small runtimes and engines, and poison for all memory that an engine should not read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from transformers import GenerationConfig

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine import Engine, PrefixCache
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.state.hybrid_state import MambaState
from test.support.checkpoints import DENSE, nemotron_config, small_config

CHUNK = 16
VOCAB = 160


def engine_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> HybridForCausalLM:
    """Return a Mamba and an attention layer of the smallest sizes, whose greedy texts depend on all earlier tokens.

    With tied embeddings and little weight on the layers' outputs, they would repeat the last token for ever.
    """
    sizes = dict(hidden_size=32, shared_intermediate_size=32, mamba_n_heads=4, mamba_d_head=16)
    layers = dict(layer_types=("mamba", "attention"), max_position_embeddings=200)
    weights = dict(tie_word_embeddings=False, embedding_multiplier=1.0, residual_multiplier=1.0)
    return random_model(small_config(**{**DENSE, **sizes, **layers, **weights, **changes}), seed, dtype)


def nemotron_engine_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> HybridForCausalLM:
    """Return a Nemotron model with one layer of each kind, as small."""
    sizes = dict(hidden_size=32, mlp_intermediate_size=32, shared_intermediate_size=24, intermediate_size=24)
    layers = dict(layer_types=("mamba", "moe", "attention", "mlp"), max_position_embeddings=200)
    heads = dict(mamba_n_heads=4, mamba_n_groups=2, head_dim=16)
    return random_model(nemotron_config(**sizes, **layers, **heads, **changes), seed, dtype)


def mtp_engine_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> HybridForCausalLM:
    """Return the same with layers for multi-token prediction."""
    return nemotron_engine_model(seed, dtype, mtp_layer_types=("attention", "moe"))


ENGINE_MODELS = {
    "granite": engine_model,
    "nemotron": nemotron_engine_model,
    "nemotron, latent": partial(nemotron_engine_model, moe_latent_size=20),
}


class ChunkRuntime(CPURuntime):
    """A runtime that cuts prompts every 16 tokens and records each step's rows, and logits by sequence length."""

    tokens_per_step = CHUNK

    def __init__(self, model, kernels="torch", state_dtype=None):
        super().__init__(model, GenerationConfig(top_k=None), cpu_kernels=kernels, state_dtype=state_dtype)
        self.steps = []
        self.logits = {}

    def step(self, state, rows, all_logits=False):
        self.steps.append(rows)
        logits = super().step(state, rows, all_logits)
        self._keep(rows, logits)
        return logits

    def step_with_hidden_states(self, state, rows, all_logits=False):
        self.steps.append(rows)
        logits, hidden_states = super().step_with_hidden_states(state, rows, all_logits)
        self._keep(rows, logits)
        return logits, hidden_states

    def _keep(self, rows, logits):
        for row, row_logits in zip(rows, logits, strict=True):
            self.logits[row.start + len(row.tokens)] = row_logits.clone()


def run(engine: Engine, each_step=lambda: None) -> dict[int, list]:
    """Step until all sequences have ended, and return outputs by id."""
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
        each_step()
    return outputs


def generate_one(engine: Engine, request) -> list[int]:
    """Return the new tokens of a request that is the engine's only one."""
    id = engine.add(request)
    return tokens_of(run(engine)[id])


def tokens_of(outputs) -> list[int]:
    return [output.token for output in outputs]


def poison_state(state, free, stored) -> None:
    """Write NaN into free slots, and into the cache behind the `stored` tokens of each other slot."""
    with torch.inference_mode():
        for layer in state.layers:
            for tensor in vars(layer).values():
                for slot in free:
                    tensor[slot] = math.nan
                if not isinstance(layer, MambaState):
                    for slot, length in stored.items():
                        tensor[slot, :, length:] = math.nan


def sequences_with_slots(engine: Engine) -> list:
    """Return the running sequences, and ended ones whose snapshot is not kept yet."""
    return [*engine._live.running.values(), *engine._live.ended]


def free_slots(engine: Engine) -> list[int]:
    return engine._slots.free([sequence.slot for sequence in sequences_with_slots(engine)])


def poison_engine(engine: Engine) -> None:
    ahead = () if engine._ahead is None else engine._ahead.step.sequences
    stored = {each.slot: each.stored + (each in ahead) for each in sequences_with_slots(engine)}
    poison_state(engine._slots.state, free_slots(engine), stored)


class PoisonedPrefixCache(PrefixCache):
    """A prefix cache that fills an entry with NaN before evicting it, so that a later read would show."""

    def _evict(self, node, neighbour):
        with torch.inference_mode():
            for tensor in (*node.entry.recurrent.values(), node.entry.logits):
                tensor.fill_(math.nan)
        super()._evict(node, neighbour)


def cached_bytes(cache: PrefixCache) -> tuple[int, int]:
    """Count the bytes and entries of a prefix cache by walking its tree."""
    nodes, num_bytes, entries = [cache._root], 0, 0
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        recurrent = {} if node.entry is None else node.entry.recurrent
        tensors = [*node.keys_and_values.values(), *recurrent.values()]
        num_bytes += sum(tensor.nbytes for tensor in tensors) + (0 if node.entry is None else node.entry.logits.nbytes)
        entries += node.entry is not None
        storage = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        assert storage == sum(tensor.nbytes for tensor in tensors), "a node keeps memory of others alive"
        assert node is cache._root or node.entry is not None or node.children, "a leaf has no entry"
    return num_bytes, entries


class KnownText:
    """A drafter that proposes the tokens of a text, but another token in every third place."""

    def __init__(self, text: Sequence[int] = ()):
        self.text = text

    def propose(self, requests):
        return [self._propose(len(each.tokens), each.most) for each in requests]

    def _propose(self, start: int, most: int) -> list[int]:
        return [token + (place % 3 == 0) for place, token in enumerate(self.text[start : start + most], start)]

    def end(self, id):
        pass
