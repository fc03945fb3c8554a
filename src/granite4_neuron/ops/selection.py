"""Which implementation of each operator a runtime computes with, and why not a faster one."""

from __future__ import annotations

import importlib
from dataclasses import replace

from granite4_neuron.choices import DECODE_KERNELS, NKI_PREFILL_SCANS, PREFILL_SCANS
from granite4_neuron.config import MAMBA, GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.neuron_sdk import LOGICAL_CORE_SIZE
from granite4_neuron.ops.mamba_kernels import MambaKernels, with_layout
from granite4_neuron.ops.operators import Operator, Operators


def select_operators(
    base: Operators,
    config: GraniteMoeHybridConfig,
    tp_degree: int = 1,
    prefill_scan: str = PREFILL_SCANS[0],
    decode_kernel: str = DECODE_KERNELS[0],
) -> Operators:
    """`base` with the Mamba kernels that are asked for, and without what does not work for this model with them.

    The NKI kernels run compiled on a Neuron device and in NKI's simulator on a CPU, which is for tests.

    Args:
        base: a backend's operators: `ops.cpu.operators(...)`, or `ops.xla.XLA`.
        config, tp_degree: the model, and over how many ranks it is split.
        prefill_scan: for steps of several tokens: "chunked", as the base has it (linear in the number of tokens),
            "quadratic" (one decay matrix over all of them), or an NKI kernel: "ssd" (chunks as matrix products) or
            "scan" (token by token).
        decode_kernel: for steps of one token: "torch", as the base has it, or "nki", which is also for steps of a few
            tokens, such as verifications.

    Raises:
        UserError: there is no such implementation; or it needs the package nki, which is not installed, or does not
            take the model's dimensions.
    """
    if prefill_scan not in PREFILL_SCANS:
        raise UserError(f"prefill_scan is {prefill_scan!r}; it must be one of {', '.join(PREFILL_SCANS)}.")
    if decode_kernel not in DECODE_KERNELS:
        raise UserError(f"decode_kernel is {decode_kernel!r}; it must be one of {', '.join(DECODE_KERNELS)}.")
    operators = base
    if (prefill_scan, decode_kernel) != (PREFILL_SCANS[0], DECODE_KERNELS[0]):
        operators = _with_mamba_kernels(operators, config, tp_degree, prefill_scan, decode_kernel)
    if tp_degree > 1:
        reason = f"they are for a whole model, and this is a part of {tp_degree}"
        operators = _without_fused_layers(operators, reason)
    return operators


def uses_nki(prefill_scan: str, decode_kernel: str) -> bool:
    """Whether any of them is an NKI kernel."""
    return prefill_scan in NKI_PREFILL_SCANS or decode_kernel == "nki"


def _with_mamba_kernels(
    base: Operators, config: GraniteMoeHybridConfig, tp_degree: int, prefill_scan: str, decode_kernel: str
) -> Operators:
    nki: dict[str, MambaKernels] = {}
    refusals = base.refusals
    if uses_nki(prefill_scan, decode_kernel):
        _check_dimensions(config, tp_degree, prefill_scan)
        nki, reasons = _nki_kernels(config, tp_degree)
        refusals += reasons if decode_kernel == "nki" else ()
    prefill = {"chunked": base.mamba_prefill, "quadratic": base.mamba_quadratic, **nki}[prefill_scan]
    decode = {"torch": base.mamba_decode, **nki}[decode_kernel]
    # Decode decides how the state lies: it reads and writes it for every token.
    prefill = with_layout(prefill, decode.has_kernel_layout)
    operators = replace(base, mamba_prefill=prefill, mamba_decode=decode, refusals=refusals)
    if decode_kernel == "nki":
        operators = replace(operators, round_state=_rounding_in_hardware())
    choice = f"the prefill scan {prefill_scan} and the decode kernel {decode_kernel} are asked for"
    return _without_fused_layers(operators, f"they have their own scan, and {choice}")


def _without_fused_layers(operators: Operators, reason: str) -> Operators:
    if operators.decoder_layers is None:
        return operators
    refusal = f"the fused decoder layers are not used: {reason}."
    return replace(operators, decoder_layers=None, refusals=(*operators.refusals, refusal))


def _nki_kernels(config: GraniteMoeHybridConfig, tp_degree: int) -> tuple[dict[str, MambaKernels], tuple[str, ...]]:
    """By the names of the choices, and why decode is not by one kernel, if it is not."""
    try:
        importlib.import_module("nki")
    except ImportError:
        raise UserError("NKI kernels need the package nki of the Neuron SDK, which is not installed.") from None
    # Not at the top: the package works without nki.
    from granite4_neuron.ops.nki.mamba import DECODE, SCAN, SSD, decode_kernels

    if MAMBA not in config.layer_types:
        return {"scan": SCAN, "ssd": SSD, "nki": DECODE}, ()
    rank = config.rank_dimensions(tp_degree)
    try:
        decode = decode_kernels(rank.mamba_heads, config.mamba_d_head, rank.mamba_groups, config.mamba_d_state)
    except UserError as error:
        reason = f"A Mamba layer's decode takes a kernel for its convolution and one for its recurrence. {error}"
        return {"scan": SCAN, "ssd": SSD, "nki": DECODE}, (reason,)
    return {"scan": SCAN, "ssd": SSD, "nki": decode}, ()


def _rounding_in_hardware() -> Operator:
    # Not at the top: the package works without nki.
    from granite4_neuron.ops.nki.mamba import round_in_hardware

    return round_in_hardware


def _check_dimensions(config: GraniteMoeHybridConfig, tp_degree: int, prefill_scan: str) -> None:
    if MAMBA not in config.layer_types:
        return
    num_heads, head_dim = config.rank_dimensions(tp_degree).mamba_heads, config.mamba_d_head
    d_state, d_states = config.mamba_d_state, (64, 128) if prefill_scan in NKI_PREFILL_SCANS else (32, 64, 128)
    if num_heads % LOGICAL_CORE_SIZE or head_dim not in (32, 64, 128) or d_state not in d_states:
        raise UserError(
            f"the NKI kernels take a multiple of {LOGICAL_CORE_SIZE} heads a rank, head_dim 32, 64 or 128 and d_state "
            f"64 or 128, or 32 for decode; here are {num_heads} heads, head_dim {head_dim} and d_state {d_state}."
        )
