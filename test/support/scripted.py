"""Answers that a test chooses in place of a model."""

from collections.abc import Callable, Sequence

from granite4_neuron.ops.sampling import Chosen


def script_tokens(monkeypatch, next_token: Callable[[Sequence[int]], int]) -> None:
    """Have each sequence take the token that `next_token` returns for its tokens so far."""
    monkeypatch.setattr(
        "granite4_neuron.engine.sampling.Sampler.ask",
        lambda sampler, logits, tokens, drafts=(): Chosen(next_token([*tokens, *drafts])),
    )
