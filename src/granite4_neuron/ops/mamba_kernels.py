"""Which implementation of its operators a Mamba-2 layer uses, by name."""

from __future__ import annotations

import importlib

import torch

from granite4_neuron.errors import UserError
from granite4_neuron.ops.causal_conv1d import causal_conv1d
from granite4_neuron.ops.launch_parameters import HEURISTIC, LaunchParameters
from granite4_neuron.ops.mamba_chunk_scan import mamba_chunk_scan_combined
from granite4_neuron.ops.selective_state_update import selective_state_step
from granite4_neuron.ops.xla.mamba import CHUNK_SIZE, mamba_chunk_scan

NKI_PREFILL_SCANS = ("scan", "ssd")
PREFILL_SCANS = ("chunked", "quadratic", *NKI_PREFILL_SCANS)
DECODE_KERNELS = ("torch", "nki")
# Physical NeuronCores to a logical one; Trainium2's default, and what the NKI kernels are launched for. The runtime's
# setting must be the same.
LOGICAL_CORE_SIZE = 2


class MambaKernels:
    """The operators of a Mamba-2 layer: in torch, or as NKI kernels.

    The NKI kernels run compiled on a Neuron device and in NKI's simulator on a CPU, which is for tests.

    Args:
        prefill_scan: for steps of several tokens: "chunked" (linear in the number of tokens), "quadratic" (one decay
            matrix over all of them), or an NKI kernel: "ssd" (chunks as matrix products) or "scan" (token by token).
        decode_kernel: for steps of one token: "torch" or "nki".

    Raises:
        ValueError: there is no such implementation.
        UserError: it needs the package nki, which is not installed.
    """

    def __init__(self, prefill_scan: str = "chunked", decode_kernel: str = "torch"):
        if prefill_scan not in PREFILL_SCANS:
            raise ValueError(f"prefill_scan is {prefill_scan!r}; it must be one of {', '.join(PREFILL_SCANS)}.")
        if decode_kernel not in DECODE_KERNELS:
            raise ValueError(f"decode_kernel is {decode_kernel!r}; it must be one of {', '.join(DECODE_KERNELS)}.")
        self.prefill_scan = prefill_scan
        self.decode_kernel = decode_kernel
        if self.uses_nki:
            try:
                importlib.import_module("nki")
            except ImportError:
                raise UserError("NKI kernels need the package nki of the Neuron SDK, which is not installed.") from None

    @property
    def are_default(self) -> bool:
        """Whether nobody asked for others."""
        return (self.prefill_scan, self.decode_kernel) == (PREFILL_SCANS[0], DECODE_KERNELS[0])

    @property
    def has_kernel_layout(self) -> bool:
        """Whether ssm_state is [slots, d_state, num_heads, head_dim], as the NKI kernels have it.

        The decode kernel decides: it reads and writes the state for every token. A prefill that wants it otherwise
        transposes it once a step.
        """
        return self.decode_kernel == "nki"

    @property
    def uses_nki(self) -> bool:
        """Whether any of them is an NKI kernel."""
        return self.prefill_scan in NKI_PREFILL_SCANS or self.decode_kernel == "nki"

    def check(self, num_heads: int, head_dim: int, d_state: int) -> None:
        """See whether the kernels take a rank's dimensions.

        Raises:
            UserError: they do not.
        """
        if not self.uses_nki:
            return
        if num_heads % LOGICAL_CORE_SIZE or head_dim not in (32, 64, 128) or d_state not in (64, 128):
            raise UserError(
                f"the NKI kernels take a multiple of {LOGICAL_CORE_SIZE} heads a rank, head_dim 32, 64 or 128 and "
                f"d_state 64 or 128; here are {num_heads} heads, head_dim {head_dim} and d_state {d_state}."
            )

    def convolve(
        self,
        x: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`causal_conv1d`; from a kernel y is in x's dtype."""
        is_decode = x.shape[1] == 1
        if not self._is_nki(is_decode):
            return causal_conv1d(x, conv_state, weight, bias, lengths)
        from granite4_neuron.ops.nki.conv1d_prefill import conv1d_prefill
        from granite4_neuron.ops.nki.conv1d_update import conv1d_update
        from granite4_neuron.ops.nki.launch import launch

        bias = torch.zeros_like(weight[:, 0]) if bias is None else bias
        if is_decode:
            y, new_state = launch(conv1d_update, x[:, 0], conv_state, weight, bias)
            return y[:, None], new_state.where((lengths > 0)[:, None, None], conv_state)
        return launch(conv1d_prefill, x, conv_state, weight, bias, lengths.to(torch.int32))

    def scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        ssm_state: torch.Tensor,
        launch_parameters: LaunchParameters = HEURISTIC,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrence over a step's tokens, from `ssm_state` on.

        Args:
            x, dt, A, B, C, D: as `mamba_chunk_scan_combined` takes them.
            ssm_state: [batch, num_heads, head_dim, d_state], or as `has_kernel_layout` says; float32.
            launch_parameters: for torch on a CPU.

        Returns:
            (y, new ssm_state): y is like x, the state like the old one. In torch the old state may be overwritten.
        """
        is_decode = x.shape[1] == 1
        is_nki = self._is_nki(is_decode)
        transposed = is_nki != self.has_kernel_layout
        if transposed:
            ssm_state = _other_layout(ssm_state, is_nki)
        if is_nki:
            y, ssm_state = self._scan_nki(x, dt, A, B, C, D, ssm_state)
        elif is_decode:
            y = selective_state_step(ssm_state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D)[:, None]
        else:
            y, ssm_state = self._scan_torch(x, dt, A, B, C, D, ssm_state, launch_parameters)
        return y, _other_layout(ssm_state, not is_nki) if transposed else ssm_state

    def _is_nki(self, is_decode: bool) -> bool:
        return self.decode_kernel == "nki" if is_decode else self.prefill_scan in NKI_PREFILL_SCANS

    def _scan_torch(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        ssm_state: torch.Tensor,
        launch_parameters: LaunchParameters,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_quadratic = self.prefill_scan == "quadratic"
        if x.device.type != "cpu":
            return mamba_chunk_scan(x, dt, A, B, C, D, ssm_state, x.shape[1] if is_quadratic else CHUNK_SIZE)
        chunk_size = x.shape[1] if is_quadratic else launch_parameters.torch_chunk_size
        return mamba_chunk_scan_combined(
            x, dt, A, B, C, chunk_size, D, initial_states=ssm_state, return_final_states=True
        )

    def _scan_nki(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        ssm_state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from granite4_neuron.ops.nki.launch import launch
        from granite4_neuron.ops.nki.selective_scan import selective_scan
        from granite4_neuron.ops.nki.ssd_chunk_scan import ssd_chunk_scan
        from granite4_neuron.ops.nki.ssm_decode import ssm_decode

        if x.shape[1] == 1:
            y, ssm_state = launch(ssm_decode, ssm_state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D.float())
            return y[:, None], ssm_state
        kernel = ssd_chunk_scan if self.prefill_scan == "ssd" else selective_scan
        return launch(kernel, x, dt, A, B, C, D.float(), ssm_state)


def _other_layout(ssm_state: torch.Tensor, to_kernel: bool) -> torch.Tensor:
    """[batch, num_heads, head_dim, d_state] to the kernels' [batch, d_state, num_heads, head_dim], or back."""
    return ssm_state.permute((0, 3, 1, 2) if to_kernel else (0, 2, 3, 1)).contiguous()
