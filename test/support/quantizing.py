"""Models with quantized weights, without a checkpoint."""

from granite4_neuron.checkpoint.loading import set_parameter
from granite4_neuron.checkpoint.weight_plan import formats_for
from granite4_neuron.model.parameters import EMBEDDING, HEAD


def quantize_model(model, format, keep=()):
    """Quantize the matrices that `load_model` quantizes, but for those in the layers `keep`. Return the names."""
    names = []
    for name, each in formats_for(model, format).items():
        if not name.startswith(tuple(f"model.layers.{layer}." for layer in keep)):
            source = model.get_parameter(EMBEDDING if name == HEAD and model.config.tie_word_embeddings else name)
            set_parameter(model, name, each.quantize(source.detach()))
            names.append(name)
    model.tie_weights()
    return names
