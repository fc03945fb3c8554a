"""vLLM's operators: a recurrence by three of them, and drafts judged: python examples/vllm_operators.py"""

import torch

from granite4_neuron.vllm.metadata import SamplingMetadata
from granite4_neuron.vllm.operators import mamba_chunk_scan_combined_varlen, selective_scan_fn, selective_state_update
from granite4_neuron.vllm.rejection_sampler import rejection_sample

torch.manual_seed(0)
HEADS, WIDTH, STATES = 4, 8, 16
starts, ends = torch.tensor([0, 6, 10]), torch.tensor([5, 9])  # two sequences, one after the other
x, dt = torch.randn(10, HEADS, WIDTH), torch.randn(10, HEADS)
A, (B, C) = -torch.rand(HEADS), torch.randn(2, 10, 1, STATES)
states, rows = torch.zeros(3, HEADS, WIDTH, STATES), torch.arange(2)


def scan(tokens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Run these tokens of both sequences with Mamba-2's matrices, and leave their states in slots 1 and 2."""
    inputs = x[tokens], dt[tokens], A, B[tokens], C[tokens]
    slots = {"final_states_out": states, "final_state_indices": rows + 1}
    out = torch.empty_like(inputs[0])
    mamba_chunk_scan_combined_varlen(*inputs, 64, starts, starts, rows, rows, out, dt_softplus=True, **slots)
    return out


whole = scan(torch.arange(10), starts)
scan(torch.tensor([0, 1, 2, 3, 4, 6, 7, 8]), torch.tensor([0, 5, 8]))  # all but the last tokens
inputs = x[ends], dt[ends, :, None].expand(2, HEADS, WIDTH), A[:, None, None].expand(HEADS, WIDTH, STATES)
step = selective_state_update(states, *inputs, B[ends], C[ends], dt_softplus=True, state_batch_indices=rows + 1)
u, delta = x.flatten(1).T.contiguous(), dt.repeat_interleave(WIDTH, 1).T.contiguous()
channels = A.repeat_interleave(WIDTH)[:, None].expand(-1, STATES), B[:, 0].T, C[:, 0].T
scan_of_channels = selective_scan_fn(
    u, torch.zeros(2, len(u), STATES), delta, *channels, delta_softplus=True, query_start_loc=starts, null_block_id=None
)
print("one token more:", torch.allclose(step, whole[ends], atol=1e-5))
print("channel by channel:", torch.allclose(scan_of_channels.T, whole.flatten(1), atol=1e-5))
drafts, logits = torch.tensor([7, 3]), 9 * torch.eye(10)[[7, 4]]  # the model would choose 7 and 4
greedy = SamplingMetadata(None, all_greedy=True, all_random=False)
print("tokens:", rejection_sample(drafts, [2], 2, torch.tensor([2]), None, logits, torch.tensor([5]), greedy).tolist())
