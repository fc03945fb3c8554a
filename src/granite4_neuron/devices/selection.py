"""Selection of the implementation of each operator for a runtime, and the reasons why a faster one is not used."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from granite4_neuron.config import MAMBA, ModelConfig
from granite4_neuron.config.choices import DECODE_KERNELS, EXPERTS_DECODE, NKI_PREFILL_SCANS, PREFILL_SCANS
from granite4_neuron.devices.graphs import input_first, moe
from granite4_neuron.devices.graphs.moe import CHOSEN, MOST_GATHERED, expert_path
from granite4_neuron.devices.neuron.expert_slots import num_slots
from granite4_neuron.devices.neuron.forms import FusedMixerMamba2
from granite4_neuron.devices.neuron.sdk import LOGICAL_CORE_SIZE, require_nki
from granite4_neuron.errors import UserError, check_choice
from granite4_neuron.ops.mamba_operators import MambaOperators, with_layout
from granite4_neuron.ops.operators import Operators


def select_operators(
    base: Operators,
    config: ModelConfig,
    tp_degree: int = 1,
    prefill_scan: str = PREFILL_SCANS[0],
    decode_kernel: str = DECODE_KERNELS[0],
    experts_decode: str | None = None,
) -> Operators:
    """Return `base` with the kernels that are asked for, and without operators that are incompatible with them.

    The NKI kernels run compiled on a Neuron device; for tests they run in NKI's simulator on a CPU.

    Args:
        base: a backend's operators: `devices.cpu.operators.choose_operators(...)`, or `devices.graphs.operators.XLA`.
        config, tp_degree: the model, and the number of ranks that it is split over.
        prefill_scan: for steps of several tokens: "chunked", as the base has it (linear in the number of tokens),
            "quadratic" (one decay matrix over all of them), or an NKI kernel: "ssd" (chunks as matrix products) or
            "scan" (token by token).
        decode_kernel: for steps of one token: "torch", as the base has it, or "nki", which is also for steps of a few
            tokens, such as verifications.
        experts_decode: for the experts of few tokens, in place of the base's form: "kernel", an NKI kernel that reads
            each chosen expert's weights once; "all", which multiplies every token with all experts; "gather", which
            fetches the weights of each choice by index where that moves less than all. None for the base's form, which
            on Neuron gathers for up to `MOST_GATHERED` tokens.

    Raises:
        UserError: there is no such implementation; it does not support the model's dimensions; or it needs the package
            nki, which is not installed or too old.
    """
    check_choice("prefill_scan", prefill_scan, PREFILL_SCANS)
    check_choice("decode_kernel", decode_kernel, DECODE_KERNELS)
    operators = base
    if experts_decode is not None:
        check_choice("experts_decode", experts_decode, EXPERTS_DECODE)
        operators = _with_experts(operators, config, tp_degree, experts_decode)
    if (prefill_scan, decode_kernel) != (PREFILL_SCANS[0], DECODE_KERNELS[0]):
        operators = _with_mamba_operators(operators, config, tp_degree, prefill_scan, decode_kernel)
    return operators


def default_experts_decode(kernels: str, config: ModelConfig, tp_degree: int, tokens: int) -> str:
    """Return the form of the experts of so many decoded tokens on a Neuron device, with kernels in "torch" or "nki".

    In torch it is "gather" for few tokens that choose less than all weights, though other ports report a gather that
    was compiled wrongly without a message: the probe compares it with the definition.
    """
    if kernels == "nki":
        return "kernel"
    if tokens > MOST_GATHERED or not config.num_local_experts:
        return "all"
    width = config.rank_dimensions(tp_degree).intermediate_size
    sizes = config.num_experts_per_tok, config.num_local_experts, width
    return "gather" if expert_path(tokens, *sizes, has_gate=config.has_gated_mlp).name == CHOSEN else "all"


def _with_experts(base: Operators, config: ModelConfig, tp_degree: int, form: str) -> Operators:
    if not config.num_local_experts:
        return base
    if form == "kernel" and not config.has_gated_mlp:
        raise UserError("the NKI kernel for experts multiplies a gate, which these experts lack; choose all or gather.")
    in_torch = input_first if base.input_first_experts else moe
    if form == "gather":
        return replace(base, fused_experts=in_torch.fused_experts)
    if form == "all":
        return replace(base, fused_experts=partial(in_torch.fused_experts, most_gathered=0))
    require_nki()
    # Not at the top: the package works without nki.
    from granite4_neuron.devices.neuron.nki.experts import MAX_TOKENS
    from granite4_neuron.devices.neuron.nki.experts import fused_experts as by_kernel
    from granite4_neuron.devices.neuron.nki.experts_decode import check_experts_decode

    slots = num_slots(MAX_TOKENS, config.num_experts_per_tok, config.num_local_experts)
    width = config.rank_dimensions(tp_degree).intermediate_size
    check_experts_decode(MAX_TOKENS, slots, config.hidden_size, width, getattr(torch, config.torch_dtype).itemsize)
    return replace(base, fused_experts=by_kernel, input_first_experts=True)


def uses_nki(prefill_scan: str, decode_kernel: str) -> bool:
    """Return whether either is an NKI kernel."""
    return prefill_scan in NKI_PREFILL_SCANS or decode_kernel == "nki"


def _with_mamba_operators(
    base: Operators, config: ModelConfig, tp_degree: int, prefill_scan: str, decode_kernel: str
) -> Operators:
    operators = base
    if uses_nki(prefill_scan, decode_kernel):
        require_nki()
    if prefill_scan in NKI_PREFILL_SCANS:
        operators = replace(operators, mamba_prefill=_nki_prefill(config, tp_degree, prefill_scan))
    elif prefill_scan == "quadratic":
        operators = replace(operators, mamba_prefill=base.mamba_quadratic)
    if decode_kernel == "nki":
        operators = _with_nki_decode(operators, config, tp_degree)
        if prefill_scan == "ssd":
            operators = _with_nki_prompts(operators)
    # Decode decides the state's layout, because it reads and writes the state for every token.
    prefill = with_layout(operators.mamba_prefill, operators.mamba_decode.has_kernel_layout)
    choice = f"the prefill scan {prefill_scan} and the decode kernel {decode_kernel} are asked for"
    fallback = f"the fused decoder layers are not used: they have their own scan, and {choice}."
    operators = replace(operators, mamba_prefill=prefill)
    if operators.fused_layers is None:
        return operators
    return replace(operators, fused_layers=None, fallbacks=(*operators.fallbacks, fallback))


def _nki_prefill(config: ModelConfig, tp_degree: int, prefill_scan: str) -> MambaOperators:
    # Not at the top: the package works without nki.
    from granite4_neuron.devices.neuron.nki.limits import check_convolution, check_scan
    from granite4_neuron.devices.neuron.nki.mamba import SCAN, SSD

    if MAMBA in config.layer_types:
        check_scan(*_scan_dimensions(config, tp_degree), LOGICAL_CORE_SIZE)
        channels = config.rank_dimensions(tp_degree).mamba_conv_dim
        check_convolution(channels, config.mamba_d_conv, 1, LOGICAL_CORE_SIZE)
    return {"scan": SCAN, "ssd": SSD}[prefill_scan]


def _with_nki_decode(operators: Operators, config: ModelConfig, tp_degree: int) -> Operators:
    # Not at the top: the package works without nki.
    from granite4_neuron.devices.neuron.nki.mamba import fused_mixer, round_in_hardware

    if MAMBA not in config.layer_types:
        return operators
    decode = with_layout(operators.mamba_decode, has_kernel_layout=True)
    decode = replace(decode, fused_mixer=fused_mixer(*_scan_dimensions(config, tp_degree)))
    operators = replace(operators, mamba_decode=decode, mixer_form=FusedMixerMamba2, round_state=round_in_hardware)
    reason = "they have their own recurrence, and the decode kernel nki is asked for"
    if operators.token_operators is None:
        return operators
    fallback = f"the token kernels are not used: {reason}."
    return replace(operators, token_operators=None, fallbacks=(*operators.fallbacks, fallback))


def _with_nki_prompts(operators: Operators) -> Operators:
    """Return operators whose prompts are one kernel too, within the limits that are checked for both its parts."""
    # Not at the top: the package works without nki.
    from granite4_neuron.devices.neuron.nki.mamba import PROMPT_MIXER

    return replace(operators, mamba_prefill=replace(operators.mamba_prefill, fused_mixer=PROMPT_MIXER))


def _scan_dimensions(config: ModelConfig, tp_degree: int) -> tuple[int, int, int, int]:
    """Return (num_heads, head_dim, n_groups, d_state) of a rank."""
    rank = config.rank_dimensions(tp_degree)
    return rank.mamba_heads, config.mamba_d_head, rank.mamba_groups, config.mamba_d_state
