"""Chooses how each layer of a bound model is computed: by its definition, or by a faster form of it.

A form is chosen once, when a model is bound, and says whether it supports a layer or why not. While a step runs, only
its numbers of tokens and rows decide: a form falls back to the definition for steps that it does not support.

A form is a subclass of `DecoderLayer` or of one of its parts, over the layer's own weights. `devices.cpu.forms`, all
layers as one call, is a form as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from granite4_neuron.devices.cuda.forms import TokenLayer
from granite4_neuron.devices.neuron.forms import mixer_class
from granite4_neuron.model.binding import as_form
from granite4_neuron.model.decoder_layer import DecoderLayer


def forms_of(layers: Iterable[DecoderLayer]) -> tuple[list[DecoderLayer], list[str]]:
    """Choose the form of each layer for its operators.

    Returns:
        The layers in their chosen forms; and a sentence for each reason not to use a form.
    """
    forms: list[DecoderLayer] = []
    fallbacks: dict[str, None] = {}  # in order, each once
    for layer in layers:
        reason = TokenLayer.why_not(layer) if layer.operators.token_layer is not None else None
        if reason is not None:
            fallbacks[f"the token kernels of {layer.kind} layers are not used: {reason}."] = None
        forms.append(_form_of(layer, uses_token_layer=layer.operators.token_layer is not None and reason is None))
    return forms, list(fallbacks)


def _form_of(layer: DecoderLayer, uses_token_layer: bool) -> DecoderLayer:
    if uses_token_layer:
        layer = as_form(layer, TokenLayer)
    if layer.is_mamba and (mixer := mixer_class(layer.operators)) is not type(layer.mamba):
        layer = as_form(layer, type(layer), mamba=as_form(layer.mamba, mixer))
    return layer
