"""Facts about the Neuron SDK, and about the port to it, that need no import of either."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from typing import ClassVar

from granite4_neuron.errors import UserError

# The most tokens of a step that continues a prompt. Graphs with this many fit into SBUF, see `analysis.live_set`.
CONTINUATION_TOKENS = 512
# Physical NeuronCores per logical core: the default, which the NKI kernels are launched for. The runtime's
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


@dataclass(frozen=True)
class Chip:
    """A chip of Neuron cores, used as logical cores of two physical ones (LNC=2).

    core_bytes: of HBM that a logical core can use.
    hbm_bytes_per_second, tensor_flops: of the whole chip; FLOPs in bfloat16.
    link_bytes_per_second: to other chips.
    vector_elements_per_second: of a logical core's two VectorEs, with an operand in float32.
    sbuf_bytes: of a physical core.
    """

    name: str
    core_bytes: int
    hbm_bytes_per_second: float
    tensor_flops: float
    link_bytes_per_second: float
    vector_elements_per_second: float
    sbuf_bytes: int

    logical_cores: ClassVar[int] = 4


@dataclass(frozen=True)
class Instance:
    """A machine. chips: how many it has."""

    chip: Chip
    chips: int

    @property
    def logical_cores(self) -> int:
        return self.chips * self.chip.logical_cores


_GIBIBYTE, _MEBIBYTE = 2**30, 2**20
# Rates: "Trainium2 architecture" and "Trainium3 architecture" (about-neuron/arch/neuron-hardware) and the "architecture
# guide for NKI" of each (nki/guides/architecture), in the Neuron SDK's documentation of 2026-08-21. VectorE has 256
# elements per cycle if not all have 16 bits, at 0.96 and at 1.2 GHz.
TRAINIUM2 = Chip(
    "Trainium2",
    # A logical core has 24 GiB and cannot use another core's: the compiler's limit is 25,769,803,776 bytes. "Usable
    # ceiling is 23.50 GiB each": vllm-project/vllm-neuron, examples/vllm_neuron/models/qwen3_5.
    core_bytes=47 * _GIBIBYTE // 2,
    hbm_bytes_per_second=2.9e12,
    tensor_flops=667e12,
    link_bytes_per_second=1.28e12,
    vector_elements_per_second=2 * 256 * 0.96e9,
    # "the tiles stop fitting the 24 MB SBUF": `published_latency.PLUGIN`. The documentation says 28 MiB.
    sbuf_bytes=24 * _MEBIBYTE,
)
TRAINIUM3 = Chip(
    "Trainium3",
    # 144 GiB for four logical cores. How much of its 36 GiB a core can use is not published: as much less as on
    # Trainium2 is left out.
    core_bytes=71 * _GIBIBYTE // 2,
    hbm_bytes_per_second=4.9e12,  # by the architecture page; 4.7 by the guide for NKI
    tensor_flops=671e12,
    link_bytes_per_second=2.56e12,
    vector_elements_per_second=2 * 256 * 1.2e9,
    sbuf_bytes=28 * _MEBIBYTE,  # of 32 MiB; 4 are left out, as on Trainium2
)
# One chip, sixteen, and one.
INSTANCES = {
    "trn2.3xlarge": Instance(TRAINIUM2, 1),
    "trn2.48xlarge": Instance(TRAINIUM2, 16),
    "trn3.3xlarge": Instance(TRAINIUM3, 1),
}
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
WITHOUT_TORCH_XLA = f"graphs are traced by torch_xla, which is not installed; {INSTALL_TORCH_XLA}."
NEEDS_TORCH_XLA = f"the xla backend needs torch_xla, which is not installed; {INSTALL_TORCH_XLA}."
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


def why_not_lowered() -> str | None:
    """Return why graphs of PyTorch devices cannot be lowered and counted here: a sentence on what is not installed."""
    for package, use in (("torch_mlir", "lowered"), ("jax", "counted")):
        if importlib.util.find_spec(package) is None:
            missing = f"graphs of PyTorch devices are {use} by {package}, which is not installed"
            return f"{missing}; {INSTALL_TORCH_MLIR}."
    return None


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
