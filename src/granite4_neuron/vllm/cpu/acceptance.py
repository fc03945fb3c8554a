"""Keeps the number of tokens that a sequence accepted in its last step, while the sequence pauses."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

_KEPT = "granite4_neuron_accepted"


def keeping_accepted(update_states: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap vLLM's `GPUModelRunner._update_states` so that paused sequences keep how many tokens they accepted.

    The function itself removes sequences that a step leaves out from the batch, and later puts them back as if they had
    accepted one token. Their next step would start from the wrong state.

    A sequence that was preempted starts from the beginning.
    """

    @wraps(update_states)
    def update(runner: CPUModelRunner, scheduler_output: SchedulerOutput) -> Any:
        batch, cached = runner.input_batch, scheduler_output.scheduled_cached_reqs
        for request in batch.req_id_to_index.keys() - scheduler_output.num_scheduled_tokens.keys():
            accepted = batch.num_accepted_tokens_cpu[batch.req_id_to_index[request]]
            setattr(runner.requests[request], _KEPT, int(accepted))
        result = update_states(runner, scheduler_output)
        for request in cached.req_ids:
            accepted = vars(runner.requests[request]).pop(_KEPT, None)
            if accepted is not None and request not in cached.resumed_req_ids:
                batch.num_accepted_tokens_cpu[batch.req_id_to_index[request]] = accepted
        return result

    return update


def register() -> None:
    """Replace `_update_states` in vLLM's model runner for CPUs."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner._update_states = keeping_accepted(CPUModelRunner._update_states)
