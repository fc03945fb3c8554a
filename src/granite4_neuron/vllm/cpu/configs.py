"""Checks of an engine's config for Granite 4 and Nemotron 3, before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from granite4_neuron.config import FAMILIES
from granite4_neuron.config.nemotron_h import EXPERTS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Below vLLM's own logger, so that it is formatted and written as vLLM's lines are.
_LOGGER = logging.getLogger("vllm.granite4_neuron.configs")
ARCHITECTURES = tuple(family.architecture for family in FAMILIES.values())
WORKER = "granite4_neuron.vllm.cpu.worker.Granite4Worker"


def call_with_each(check: Callable[[VllmConfig], None]) -> None:
    """Make vLLM call `check` with each config of `ARCHITECTURES` before its own checks. An error ends the start."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    for architecture in ARCHITECTURES:
        earlier = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
        MODELS_CONFIG_MAP[architecture] = _checked(earlier, check)


def _checked(earlier: Any, check: Callable[[VllmConfig], None]) -> Any:
    """Return vLLM's class of checks of a model with `check` before them."""

    class CheckedConfig(earlier):
        @classmethod
        def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
            check(vllm_config)
            super().verify_and_update_config(vllm_config)

    return CheckedConfig


def accept(vllm_config: VllmConfig) -> None:
    """Choose the worker, unless the user has chosen one; raise ValueError if a requested feature does not work here."""
    refusal = why_refused(vllm_config)
    if refusal is not None:
        raise ValueError(refusal)
    if vllm_config.parallel_config.worker_cls == "auto":
        vllm_config.parallel_config.worker_cls = WORKER


def why_refused(vllm_config: VllmConfig) -> str | None:
    """Return a sentence on the first requested feature that does not work here, with a remedy; None if all work."""
    cache_dtype = vllm_config.cache_config.cache_dtype
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if vllm_config.lora_config is not None:
        return "granite4-neuron has no LoRA in vLLM; convert --adapter merges one into a checkpoint."
    if cache_dtype not in ("auto", dtype):
        return f"granite4-neuron has no cache of {cache_dtype} with a model of {dtype}; leave out --kv-cache-dtype."
    if vllm_config.cache_config.prefix_match_unit is not None and vllm_config.model_config.is_hybrid:
        return "vLLM copies blocks of a hybrid model in parts, which gives wrong text; leave out --prefix-match-unit."
    if vllm_config.parallel_config.data_parallel_size > 1 and vllm_config.model_config.is_moe:
        return "vLLM has no data parallelism with experts on a CPU; start a server for each replica."
    if EXPERTS in getattr(vllm_config.model_config.hf_text_config, "layers_block_type", ()):
        return "vLLM has no experts without a gate on a CPU; run this model with granite4-neuron serve."
    return None


def no_speculation(reason: str) -> Callable[[VllmConfig], None]:
    """Make a check for `call_with_each` that refuses speculation, if this package does not take over because of
    `reason`, a sentence. vLLM alone gives wrong text with speculation, without an error. In all other cases the reason
    only goes to the log.
    """

    def check(vllm_config: VllmConfig) -> None:
        if vllm_config.speculative_config is not None and vllm_config.model_config.is_hybrid:
            raise ValueError(
                "vLLM's own Mamba layers give wrong text on a CPU with speculation, and granite4-neuron does not take "
                f"over: {reason} Or leave out --speculative-config."
            )
        _LOGGER.warning("granite4-neuron does not take over this model: %s", reason)

    return check
