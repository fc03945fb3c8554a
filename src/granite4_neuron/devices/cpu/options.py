"""Options of the backend cpu."""

from granite4_neuron.config.choices import CPU_KERNELS, FOLDER_VARIABLE, MERGE_INSTEAD
from granite4_neuron.devices.options import ARITHMETIC, QUANTIZE, STATE_DTYPE
from granite4_neuron.runtime.declaration import Option

_BELONGS = "tuned launch parameters and CPU kernels belong to the backend cpu; the others have none."

OPTIONS = (
    *ARITHMETIC,
    Option(
        "cpu_kernels",
        "kernels of the cpu backend: fused ones, compiled for this processor at first use, or plain torch (default: "
        "%(default)s)",
        _BELONGS,
        default=CPU_KERNELS[0],
        choices=CPU_KERNELS,
        changes_numbers=False,  # the runtime tells which ones it got: fused kernels may not compile here
    ),
    Option(
        "tuned_configs",
        "for the cpu backend: a folder of launch parameters that the tune command wrote (default: the folder that the "
        f"environment variable {FOLDER_VARIABLE} names, if any)",
        _BELONGS,
        metavar="DIR",
        changes_numbers=False,  # the runtime tells the one parameter that does
    ),
    QUANTIZE,
    Option(
        "cache_weights",
        "for the cpu backend: keep the weights as they lie in memory in this folder, and read them from there at the "
        "next start, which then converts nothing",
        metavar="DIR",
        changes_numbers=False,  # they are the same
    ),
    STATE_DTYPE,
    # --speculate of the commands implies it.
    Option(
        "mtp",
        refusal="drafting with the model's layers for multi-token prediction is for the backend cpu, and the backend "
        "here is {backend}.",
        default=False,
        changes_numbers=False,
    ),
    # --adapter of the commands is of one adapter, and not all of them have it.
    Option(
        "adapters",
        refusal=f"adapters run on the backend cpu only, and the backend here is {{backend}}; {MERGE_INSTEAD}.",
        default={},
        changes_numbers=False,  # they change the weights
    ),
)
