"""Prints, as JSON, which output of each graph of the XLA runtime is the new value of which state tensor.

This is a program, `python -m test.support.xla_aliases VARIANT`, because XLA reads the folder for compiled graphs when a
process starts. A graph is a list of [state tensor, output, parameter]: the tensor's index in `HybridState.tensors`, and
the graph's numbers of the output and of the old value. Variants other than "right" are planted bugs. They run the first
graph only, because a later graph fails on state left unwritten.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from unittest.mock import patch

import torch
import torch_xla
from transformers import GenerationConfig

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.devices.xla import runtime as xla
from granite4_neuron.planning.analysis.hlo_cost import parameter_numbers
from granite4_neuron.runtime.interface import Row
from granite4_neuron.state.hybrid_state import input_output_aliases
from test.support.checkpoints import small_config

VARIANTS = {
    "right": lambda states: states,
    "one is dropped": lambda states: states[:-1],
    "another order": lambda states: states[::-1],
}


def main(variant: str) -> None:
    model = random_model(small_config(layer_types=("mamba", "attention") * 2))
    runtime = xla.XLARuntime(model, GenerationConfig(), (16,))
    state = runtime.allocate(2, 50)
    tensors = list(state.tensors())
    numbers = {id(tensor): index for index, tensor in enumerate(tensors)}
    old_values: list[torch.Tensor] = []
    stated: dict[torch.Tensor, int] = {}
    graphs: list[list[list[int]]] = []

    def planted_aliases(states: Iterable[torch.Tensor], num_results: int) -> dict[torch.Tensor, int]:
        aliases = input_output_aliases(VARIANTS[variant](list(states)), num_results)
        stated.clear()
        stated.update(aliases)
        return aliases

    def recorded_sync(outputs: list[torch.Tensor], *arguments: object, **options: object) -> None:
        parameters = parameter_numbers(outputs, old_values)
        places = [numbers[id(tensor)] for tensor in stated]
        graphs.append(
            [[place, output, parameters[place]] for place, output in zip(places, stated.values(), strict=True)]
        )
        old_values.clear()  # a buffer with other users is not donated
        sync(outputs, *arguments, **options)

    sync = torch_xla._XLAC._xla_sync_multi
    with (
        patch.object(xla, "input_output_aliases", planted_aliases),
        patch.object(torch_xla._XLAC, "_xla_sync_multi", recorded_sync),
    ):

        def run(method, *arguments):
            old_values[:] = [tensor.clone() for tensor in tensors]
            return method(state, *arguments)

        run(runtime.step, [Row(1, 0, [3] * 9)])
        if variant == "right":
            run(runtime.step, [Row(1, 9, [3])])
            verification = run(runtime.verify, [Row(1, 10, [3, 4])])
            run(runtime.commit, verification, [1])
            run(runtime.copy, 1, 2, 10)
            snapshot = run(runtime.snapshot, 1, 10)
            run(runtime.restore, [snapshot], 2)
    print(json.dumps(graphs))


if __name__ == "__main__":
    main(sys.argv[1])
