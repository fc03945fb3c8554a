"""Chooses how each layer of a bound model is computed: by its definition, or by a faster form of it.

A form is chosen once, when a model is bound, and says whether it supports a layer or why not. While a step runs, only
its numbers of tokens and rows decide: a form falls back to the definition for steps that it does not support.

A form is a subclass of `DecoderLayer` or of one of its parts, over the layer's own weights. The operators of a device
hand in its forms.
"""

from __future__ import annotations

from collections.abc import Iterable

from granite4_neuron.model.binding import as_form
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.ops import Operators


def forms_of(layers: Iterable[DecoderLayer]) -> tuple[list[DecoderLayer], list[str]]:
    """Choose the form of each layer for its operators.

    Returns:
        The layers in their chosen forms; and a sentence for each reason not to use a form.
    """
    forms: list[DecoderLayer] = []
    fallbacks: dict[str, None] = {}  # in order, each once
    for layer in layers:
        form, reason = _token_form(layer)
        if reason is not None:
            fallbacks[f"the token kernels of {layer.kind} layers are not used: {reason}."] = None
        forms.append(_with_mixer(layer if form is None else as_form(layer, form)))
    return forms, list(fallbacks)


def mixer_class(operators: Operators) -> type[Mamba2]:
    """Return the form of `Mamba2` for these operators."""
    return operators.mixer_form or Mamba2


def _token_form(layer: DecoderLayer) -> tuple[type[DecoderLayer] | None, str | None]:
    """Return the operators' form for a few tokens, or None; and why it does not support the layer, as a clause."""
    form = layer.operators.layer_form
    if form is None or layer.operators.token_operators is None:
        return None, None
    reason = form.why_not(layer)  # type: ignore[attr-defined]
    return (form if reason is None else None), reason


def _with_mixer(layer: DecoderLayer) -> DecoderLayer:
    if layer.is_mamba and (mixer := mixer_class(layer.operators)) is not type(layer.mamba):
        return as_form(layer, type(layer), mamba=as_form(layer.mamba, mixer))
    return layer
