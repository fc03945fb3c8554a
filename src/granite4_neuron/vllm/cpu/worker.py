"""vLLM's CPU worker with one correction, for requests with a seed that wait for the rest of their prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.worker.cpu_worker import CPUWorker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import ModelRunnerOutput


class Granite4Worker(CPUWorker):
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample as vLLM does, but without drawing from the generators of requests whose new token is discarded.

        vLLM draws from them and then resets them by `set_offset`, which generators on a CPU do not have.
        """
        if self.use_v2_model_runner:  # it keeps seeds, not generators
            return super().sample_tokens(grammar_output)
        batch, generators = self.model_runner.input_batch, self.model_runner.input_batch.generators
        discarded = self.model_runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        waiting = {row: generators.pop(row) for row in discarded if row in generators}
        output = super().sample_tokens(grammar_output)
        generators.update(waiting)
        return output
