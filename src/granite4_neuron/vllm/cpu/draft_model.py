"""Drafts for vLLM from a small Granite 4, hybrid or not, whose states are outside vLLM's cache.

LLM(model, speculative_config={"method": "custom_class", "num_speculative_tokens": 3,
                               "model": "granite4_neuron.vllm.cpu.draft_model.DraftModelProposer"},
    additional_config={"granite4_draft_model": folder_of_the_small_model})
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from granite4_neuron.engine import DraftModel
from granite4_neuron.engine.drafting.drafters import DraftRequest
from granite4_neuron.errors import UserError
from granite4_neuron.generation import load

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FOLDER_KEY = "granite4_draft_model"


class DraftModelProposer:
    """The proposer for vLLM's speculative method "custom_class". Drafts are greedy; vLLM accepts or rejects them.

    Raises:
        UserError: the small model's folder is not given, or has another vocabulary.
    """

    def __init__(self, vllm_config: VllmConfig):
        folder = (vllm_config.additional_config or {}).get(FOLDER_KEY)
        if folder is None:
            raise UserError(f"additional_config must name the draft model's folder as {FOLDER_KEY!r}.")
        model_config = vllm_config.model_config
        runtime, _ = load(folder, dtype=model_config.dtype)
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._max_length = model_config.max_model_len
        num_sequences = vllm_config.scheduler_config.max_num_seqs
        self._drafter = DraftModel(runtime, model_config.get_vocab_size(), num_sequences, self._max_length)
        self._drafter.allocate(num_sequences, self._max_length)
        self._sequences = Sequences(num_sequences, self._drafter.end)

    def load_model(self, *_: object, **__: object) -> None:
        """Do nothing: vLLM calls this, and the model is already loaded."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Propose drafts for each row of the batch; none for rows whose prompt is not done.

        Args:
            sampled_token_ids: the new tokens of each row.
            num_tokens_no_spec: [rows], the length of each row in tokens.
            token_ids_cpu: [rows, max_model_len], the tokens.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        lengths = {row: int(num_tokens_no_spec[row]) for row, sampled in enumerate(sampled_token_ids) if sampled}
        rows = [row for row, length in lengths.items() if length + self._most < self._max_length]
        texts = [np.array(token_ids_cpu[row, : lengths[row]]) for row in rows]
        ids = self._sequences.identify(texts)
        requests = [DraftRequest(id, text.tolist(), self._most, _Greedy()) for id, text in zip(ids, texts, strict=True)]
        for row, tokens in zip(rows, self._drafter.propose(requests), strict=True):
            drafts[row] = tokens
        return drafts


@dataclass
class _Seen:
    id: int
    tokens: np.ndarray
    step: int


class Sequences:
    """Recognises the sequences of a batch by their tokens, because vLLM passes tokens without ids.

    Two sequences with the same tokens may be confused. This is harmless, because their states are the same.

    Args:
        most: how many sequences are remembered.
        forget: called with the id of a sequence that is no longer remembered.
    """

    def __init__(self, most: int, forget: Callable[[int], None]):
        self._most, self._forget = most, forget
        self._seen: list[_Seen] = []
        self._next_id = self._step = 0

    def identify(self, texts: Sequence[np.ndarray]) -> list[int]:
        """Return an id for each text: its longest known prefix's, or a new one."""
        self._step += 1
        return [self._longest_beginning(text).id for text in texts]

    def _longest_beginning(self, text: np.ndarray) -> _Seen:
        free = [seen for seen in self._seen if seen.step < self._step and _begins_with(text, seen.tokens)]
        seen = max(free, key=lambda seen: len(seen.tokens), default=None) or self._new()
        seen.tokens, seen.step = text, self._step
        return seen

    def _new(self) -> _Seen:
        if len(self._seen) == self._most:
            oldest = min(self._seen, key=lambda seen: seen.step)
            self._seen.remove(oldest)
            self._forget(oldest.id)
        self._next_id += 1
        self._seen.append(_Seen(self._next_id, np.empty(0, dtype=np.int32), self._step))
        return self._seen[-1]


def _begins_with(text: np.ndarray, tokens: np.ndarray) -> bool:
    return len(tokens) <= len(text) and bool((text[: len(tokens)] == tokens).all())


class _Greedy:
    """A `engine.drafting.drafters.TokenChooser` that chooses the likeliest token."""

    def __call__(self, logits: torch.Tensor, tokens: Sequence[int]) -> int:
        return int(logits.argmax())

    def fork(self) -> _Greedy:
        return self
