"""Models with quantized weights, without a checkpoint."""

from granite4_neuron.checkpoint.loading import set_parameter
from granite4_neuron.checkpoint.weight_plan import formats_for
from granite4_neuron.model.parameters import EMBEDDING, HEAD
from granite4_neuron.ops import FORMATS
from granite4_neuron.ops.fp8 import FORMAT as FP8

# Those that a GPU computes with.
GPU_FORMATS = {"int8": FORMATS["int8"], "int4": FORMATS["int4"], "fp8": FP8}


def quantize_model(model, format, keep=()):
    """Quantize the matrices that `load_model` quantizes, or those that it keeps in FP8, but for those in the layers
    `keep`. Return the names.
    """
    names = []
    formats = dict.fromkeys(formats_for(model, "int4"), FP8) if format == "fp8" else formats_for(model, format)
    for name, each in formats.items():
        if not name.startswith(tuple(f"model.layers.{layer}." for layer in keep)):
            source = model.get_parameter(EMBEDDING if name == HEAD and model.config.tie_word_embeddings else name)
            set_parameter(model, name, each.quantize(source.detach()))
            names.append(name)
    model.tie_weights()
    return names
