"""NxD Inference's command inference_demo, with Granite among its model types. Its options are the same:

    python -m granite4_neuron.devices.neuron.inference_demo --model-type granitemoehybrid --task-type causal-lm run ...

The model type is the same for dense Granite. With --on-cpu the check token-matching passes, also with
--enable-fused-speculation and --num-tokens-to-check. The check logit-matching needs the SDK and has not run.

It is outside of `nxdi`, which cannot be imported without NxD Inference.
"""

from __future__ import annotations

import sys

from granite4_neuron.devices.neuron.stand_ins import why_not_importable
from granite4_neuron.errors import UserError


def main() -> None:
    """Run the command; bad input ends the process with one sentence and the status 1."""
    try:
        if reason := why_not_importable():
            sys.exit(f"inference_demo: {reason}.")
        from granite4_neuron.devices.neuron.nxdi.registration import run_inference_demo

        run_inference_demo()
    except UserError as error:
        sys.exit(f"inference_demo: {error}")


if __name__ == "__main__":
    main()
