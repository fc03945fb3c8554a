"""Facts about the Neuron SDK, and about the port to it, that need no import of either."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re

from granite4_neuron.errors import UserError

# The most tokens of a step that continues a prompt. Graphs with this many fit into SBUF, see `analysis.live_set`.
CONTINUATION_TOKENS = 512
# Physical NeuronCores per logical core: Trainium2's default, which the NKI kernels are launched for. The runtime's
# setting must be the same.
LOGICAL_CORE_SIZE = 2
# The code that multiplies with the experts' weights in NxD Inference: this package in torch; this package in torch, and
# in its NKI kernel for few tokens; or NxD, with the settings in neuron_config.blockwise_matmul_config.
EXPERT_PATHS = ("torch", "nki", "nxd")
# All of a graph's kernels: in torch, or in NKI where there is a kernel.
KERNELS = {
    "torch": dict(prefill_scan="chunked", decode_kernel="torch", expert_path="torch"),
    "nki": dict(prefill_scan="ssd", decode_kernel="nki", expert_path="nki"),
}
# The dtypes of SSM states in compiled graphs.
COMPILED_STATE_DTYPES = ("float32", "bfloat16")
# Logical cores of 24 GB, each a pair of physical cores (LNC=2), as the Neuron SDK sets them up on Trainium2.
INSTANCES = {"trn2.3xlarge": 4, "trn2.48xlarge": 64}
# The code that computes attention over a prompt: NxD Inference's kernel, or torch throughout.
ATTENTION_KERNELS = ("nxd", "torch")
# Within a folder of compiled graphs, those of a draft model.
DRAFT_GRAPHS = "draft"
PACKAGES = ("torch_xla", "torch_neuronx", "neuronx_distributed", "neuronx_distributed_inference")
GUIDE = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/libraries/nxd-inference/nxdi-setup.html"
# The first version of the package nki whose tensors have the view methods that the kernels call.
LEAST_NKI = (0, 5)
# As in requirements/xla.txt: other versions of torch have no torch_xla.
INSTALL_TORCH_XLA = (
    "install it, in an environment of its own, with: pip install 'torch==2.9.*' 'torch_xla==2.9.*' "
    "'transformers==4.57.*' 'jax==0.10.*'"
)
# The packages that lower and count the graphs of PyTorch devices; as in the extra dev.
INSTALL_TORCH_MLIR = "install both with: pip install 'torch-mlir==20261001' 'jax==0.10.*'"


def require() -> None:
    """Check that the packages of the SDK are installed.

    Raises:
        UserError: a package is missing; the message lists which, and where to read how to install them.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"NxD Inference needs the Neuron SDK (2.31 is the last that has it); missing here: {', '.join(missing)}. "
            f"How to install it: {GUIDE}"
        )


def require_nki() -> None:
    """Check that the package nki is installed in a version that the kernels support.

    Raises:
        UserError: it is not there, or too old.
    """
    try:
        importlib.import_module("nki")
    except ImportError:
        raise UserError("NKI kernels need the package nki of the Neuron SDK, which is not installed.") from None
    try:
        version = importlib.metadata.version("nki")
    except importlib.metadata.PackageNotFoundError:
        return  # a copy that was not installed as a package, such as an emulator
    numbers = tuple(map(int, re.findall(r"\d+", version)[: len(LEAST_NKI)]))
    if numbers < LEAST_NKI:
        raise UserError(
            f"NKI kernels need NKI {'.'.join(map(str, LEAST_NKI))} or later, which came with Neuron SDK 2.31; NKI "
            f"{version} is installed here. Leave out --kernels nki."
        )
