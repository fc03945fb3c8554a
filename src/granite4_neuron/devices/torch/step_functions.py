"""The functions that `TorchRuntime` compiles: a step of the model, layer by layer, as functions of tensors.

Weights are those of a module among the arguments, and state tensors are arguments that are written in place. So all
layers of a kind share a graph, and a compiler sees which of its inputs it may overwrite: TorchNeuron makes them
`input_output_aliases`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from granite4_neuron.devices.graphs.runtime import SLOT, Tensors, unpacked, with_chosen
from granite4_neuron.devices.graphs.topk import TEMPERATURE, likeliest
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.stack import LayerLoop, through_layers
from granite4_neuron.model.step import DenseStep
from granite4_neuron.state.hybrid_state import NULL_SLOT, HybridState, KeyValueState, MambaState, NoState

Call = Callable[..., Any]  # how functions of `run_step` and `run_advance` are called: as graphs, or as parts of one


class GraphKey(NamedTuple):
    """The constants of a step's graphs. Together with the shapes of the inputs they decide which graph a step takes.

    kv_length: how many cache entries attention visits.
    in_order: whether row i is in slot i + 1, for all slots.
    looks_up: whether what the rows have in the state is looked up by slot; otherwise entry i of it belongs to row i.
    all_logits: whether logits are of every token or only of each row's last one.
    verifies: whether recurrent state stays unchanged and the inputs of the recurrence are returned.
    chooses: whether the step is decode: it may run tokens chosen on the device, and chooses the next ones.
    """

    kv_length: int
    in_order: bool = False
    looks_up: bool = False
    all_logits: bool = False
    verifies: bool = False
    chooses: bool = False


def state_tensors(state: HybridState, slot: int | None = None, views_caches: bool = False) -> list[torch.Tensor]:
    """Return the state's tensors. With a slot, recurrent states are views of that slot, [1, ...]; with `views_caches`
    also caches, [2, ...]: the first entry is another slot's, and must stay as it is.
    """
    if slot is None:
        return list(state.tensors())
    recurrent, cache = slice(slot - 1, slot), slice(slot - 1, slot + 1) if views_caches else slice(None)
    return [
        tensor[recurrent if isinstance(layer, MambaState) else cache]
        for layer in state.layers
        for tensor in vars(layer).values()
    ]


def run_step(
    call: Call,
    model: HybridForCausalLM,
    key: GraphKey,
    inputs: Tensors,
    tensors: Tensors,
    layers_per_graph: int = 1,
) -> tuple[torch.Tensor | list[torch.Tensor], ...]:
    """Compute a step of the model up to its logits; arguments as for `run_layers`.

    Returns:
        Logits; with `key.chooses` each row's likeliest token, [rows] in int32, and each row's slot; kept inputs as in
        `run_layers`.
    """
    hidden_states, index, kept_inputs = run_layers(call, model, key, inputs, tensors, layers_per_graph)
    if key.chooses:
        logits, tokens = call(
            choosing_head, model, GraphKey(0, looks_up=key.looks_up, chooses=True), hidden_states, *index, tensors[0]
        )
        return logits, tokens, index[2], kept_inputs
    return call(head, model, GraphKey(0, all_logits=key.all_logits), hidden_states, *index), kept_inputs


def run_layers(
    call: Call,
    model: HybridForCausalLM,
    key: GraphKey,
    inputs: Tensors,
    tensors: Tensors,
    layers_per_graph: int = 1,
) -> tuple[torch.Tensor, Tensors, list[torch.Tensor]]:
    """Compute the last layer's results.

    Args:
        call: how each of the functions below is called.
        inputs: one tensor, of `graph_inputs`; with `key.chooses` of `decode_inputs`.
        tensors: the state's, two for each layer with a state; with `key.chooses` preceded by each slot's token chosen
            last.
        layers_per_graph: how many layers are called together.

    Returns:
        Hidden states [rows, tokens, hidden_size]; positions, lengths and slots; and with `key.verifies` each Mamba
        layer's kept inputs.
    """
    if key.chooses:
        chosen, *tensors = tensors
        inputs = *inputs, chosen
    hidden_states, positions, lengths, slots, *rotary = call(embed, model, GraphKey(0, looks_up=key.looks_up), *inputs)
    index = positions, lengths, slots
    kept_inputs: list[torch.Tensor] = []
    states = [state for _, state in _with_states(model, tensors)]
    for layers, states_of_layers in zip(
        _groups(_layers(model), layers_per_graph), _groups(states, layers_per_graph), strict=True
    ):
        arguments = layers, key, hidden_states, index, states_of_layers, rotary
        # A single layer is a graph by itself, one for each kind.
        called = run_group(call, *arguments) if layers_per_graph == 1 else call(run_group, call_inline, *arguments)
        hidden_states, kept = called
        kept_inputs += kept
    return hidden_states, index, kept_inputs


def run_group(
    call: Call,
    layers: Sequence[DecoderLayer],
    key: GraphKey,
    hidden_states: torch.Tensor,
    index: Tensors,
    states: Sequence[Tensors],
    rotary: Tensors,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute some layers; return the output of the last one, and the inputs that `through_layers` keeps."""
    # Drop the constants that a function does not need, so that steps which differ only in these share its graph.
    attention_key = key._replace(all_logits=False)
    mamba_key = attention_key._replace(kv_length=0)

    def compute(
        layer: DecoderLayer, hidden_states: torch.Tensor, state: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if layer.is_mamba:
            hidden_states, *kept = call(mamba_layer, layer, mamba_key, hidden_states, *index, *state)
            return hidden_states, kept[0] if kept else None
        if not layer.has_mixer:
            return call(feed_forward_layer, layer, mamba_key, hidden_states, *index), None
        return call(attention_layer, layer, attention_key, hidden_states, *index, *state, *rotary), None

    return through_layers(compute, layers, states, hidden_states, keep_inputs=key.verifies)


def run_advance(
    call: Call,
    model: HybridForCausalLM,
    key: GraphKey,
    inputs: Tensors,
    tensors: Tensors,
    layers_per_graph: int = 1,
) -> list[torch.Tensor]:
    """Compute `model.advance`; arguments as for `run_layers`, except `inputs`. The result has no use.

    Args:
        inputs: the tensor of `graph_inputs`; then each Mamba layer's kept inputs.
    """
    index, *kept_inputs = inputs
    mamba = [(layer, state) for layer, state in _with_states(model, tensors) if layer.is_mamba]
    arguments = [(layer, key, kept, index, *state) for (layer, state), kept in zip(mamba, kept_inputs, strict=True)]
    if layers_per_graph == 1:
        return [call(advance_layer, *each) for each in arguments]
    return [call(advance_group, group) for group in _groups(arguments, layers_per_graph)]


def advance_group(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Advance some Mamba layers' states; each has the arguments of `advance_layer`."""
    return [advance_layer(*each) for each in arguments]


Item = TypeVar("Item")


def _groups(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Return the items in groups of a size; the last one may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def _layers(model: HybridForCausalLM) -> Sequence[DecoderLayer]:
    stack = model.model.stack
    assert isinstance(stack, LayerLoop)  # only the operators of a CPU compute all layers in one call
    return stack.layers


def _with_states(model: HybridForCausalLM, tensors: Tensors) -> list[tuple[DecoderLayer, Tensors]]:
    """Return each layer with its state tensors: two, or none without a mixer."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return [(layer, next(pairs) if layer.has_mixer else ()) for layer in _layers(model)]


def embed(
    model: HybridForCausalLM, key: GraphKey, inputs: torch.Tensor, chosen: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the input of the first layer; positions, lengths and slots; and rotary tables, if the model has them.

    Args:
        inputs: of `graph_inputs`; or of `decode_inputs`, with each slot's token that was chosen last.
    """
    if chosen is not None:
        inputs = with_chosen(inputs, chosen[inputs[:, SLOT] - 1] if key.looks_up else chosen)
    input_ids, positions, lengths, slots = unpacked(inputs)
    step = _step(key, positions, lengths, slots)
    index = positions, lengths + 0, slots + 0  # `+ 0`, because an output must not be a view of an input
    return model.model.embed(input_ids, step), *index, *(model.model.rotary(step) or ())


def mamba_layer(
    layer: DecoderLayer, key: GraphKey, hidden_states: torch.Tensor, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return a Mamba layer's output; and the inputs of its recurrence, if the step verifies.

    Args:
        tensors: positions, lengths, slots, conv_state and ssm_state.
    """
    *index, conv_state, ssm_state = tensors
    output, inputs = layer(hidden_states, _step(key, *index), MambaState(conv_state, ssm_state), None)
    return (output, inputs) if key.verifies else (output,)


def attention_layer(
    layer: DecoderLayer, key: GraphKey, hidden_states: torch.Tensor, *tensors: torch.Tensor
) -> torch.Tensor:
    """Return an attention layer's output.

    Args:
        tensors: positions, lengths, slots, key and value; and rotary tables, if the model has them.
    """
    index, cache, rotary = tensors[:3], tensors[3:5], tensors[5:]
    output, _ = layer(hidden_states, _step(key, *index), KeyValueState(*cache), rotary or None)
    return output


def feed_forward_layer(
    layer: DecoderLayer, key: GraphKey, hidden_states: torch.Tensor, *index: torch.Tensor
) -> torch.Tensor:
    """Return the output of a layer without a mixer; `index` are positions, lengths and slots."""
    output, _ = layer(hidden_states, _step(key, *index), NoState(), None)
    return output


def advance_layer(
    layer: DecoderLayer,
    key: GraphKey,
    kept_inputs: torch.Tensor,
    inputs: torch.Tensor,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
) -> torch.Tensor:
    """Advance a Mamba layer's state.

    Args:
        kept_inputs: of this layer.
        inputs: of `graph_inputs`.
    """
    _, *index = unpacked(inputs)
    layer.advance(kept_inputs, _step(key, *index), MambaState(conv_state, ssm_state))
    return index[1] + 0  # a graph for Neuron must have an output


def head(model: HybridForCausalLM, key: GraphKey, hidden_states: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
    """Return the logits."""
    hidden_states = model.model.norm(hidden_states)
    given = hidden_states if key.all_logits else _step(key, *index).last_tokens(hidden_states)
    return model.head(given, of_decode=key.chooses)


def choosing_head(
    model: HybridForCausalLM, key: GraphKey, hidden_states: torch.Tensor, *tensors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and the likeliest tokens, and write these to the chosen tokens of rows that have a token.

    Args:
        tensors: positions, lengths, slots, and each slot's chosen token.
    """
    *index, chosen = tensors
    _, lengths, slots = index
    logits = head(model, key, hidden_states, *index)
    tokens = likeliest(logits)
    _set_chosen(chosen, tokens, lengths > 0, slots if key.looks_up else None)
    return logits, tokens


def _set_chosen(chosen: torch.Tensor, tokens: torch.Tensor, is_set: torch.Tensor, slots: torch.Tensor | None) -> None:
    """Write some rows' tokens to those of the rows' slots; slots are None if row i is in slot i + 1, for all slots."""
    if slots is None:
        chosen.copy_(torch.where(is_set, tokens, chosen))
    else:
        chosen[slots - 1] = torch.where(is_set, tokens, chosen[slots - 1])


def draw(
    form: Callable[..., torch.Tensor],
    draws: torch.Tensor,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    """Return what a form of `drawn` does of its arguments, and write it to the chosen tokens of the slots of rows that
    draw one; slots as for `_set_chosen`.
    """
    tokens = form(draws, logits, tokens)
    _set_chosen(chosen, tokens, draws[:, TEMPERATURE] > 0, slots)
    return tokens


def _step(key: GraphKey, positions: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor) -> DenseStep:
    cache_slots = slots.where(lengths > 0, NULL_SLOT)
    sequences = slots - 1 if key.looks_up else None
    options = dict(verifies=key.verifies, in_order=key.in_order, decodes=key.chooses)
    step = DenseStep(positions, lengths, cache_slots, key.kv_length, sequences, **options)
    step.looked_up = slots if key.looks_up else None  # an input of the graph, which takes no kernel
    return step


def call_inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function as a part of a graph."""
    return function(*arguments)
