"""Run the NxD Inference port as its users do: right-padded batches in, logits out, token after token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from granite4_neuron.devices.neuron.stand_ins import why_not_importable
from test.support.stepping import random_tokens

__all__ = ["why_not_importable"]

BUCKET = 128
MAX_LENGTH = 256


def skip_unless_importable() -> None:
    """Skip the test, or the tests of the fixture that calls this, where NxD Inference cannot be used."""
    if reason := why_not_importable():
        pytest.skip(reason)


def make_config(folder: Path, kernels: Mapping[str, str] | None = None, **options):
    """Return a checkpoint's config with `options` of its neuron_config. `kernels`: prefill_scan and decode_kernel."""
    from neuronx_distributed_inference.models.config import MoENeuronConfig
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    from granite4_neuron.devices.neuron.nxdi import GraniteMoeHybridInferenceConfig

    values = dict(
        tp_degree=1, batch_size=1, max_context_length=BUCKET, seq_len=MAX_LENGTH, torch_dtype="float32", on_cpu=True
    )
    neuron_config = MoENeuronConfig(**{**values, **options})
    return GraniteMoeHybridInferenceConfig(
        neuron_config, load_config=load_pretrained_config(str(folder)), **(kernels or {})
    )


def cpu_model(folder: Path, kernels: Mapping[str, str] | None = None, **options):
    """Load a checkpoint in CPU mode."""
    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM

    model = NeuronGraniteMoeHybridForCausalLM(str(folder), make_config(folder, kernels, **options))
    model.to_cpu()
    return model


@torch.inference_mode()
def prefill(model, prompts: Sequence[torch.Tensor], seq_ids: Sequence[int] | None = None) -> torch.Tensor:
    """Return logits [batch, vocab_size] after prompts of any lengths. Padding is not zeros; its position is 1."""
    longest = max(map(len, prompts))
    input_ids = random_tokens(model.config.vocab_size, len(prompts), longest, seed=7)
    attention_mask = torch.arange(longest) < torch.tensor([len(prompt) for prompt in prompts])[:, None]
    position_ids = torch.arange(longest).expand(len(prompts), -1).where(attention_mask, 1)
    for row, prompt in enumerate(prompts):
        input_ids[row, : len(prompt)] = prompt
    return _logits(model, input_ids, attention_mask, position_ids, seq_ids)


@torch.inference_mode()
def decode(model, tokens: Sequence[int], lengths: Sequence[int], seq_ids: Sequence[int] | None = None) -> torch.Tensor:
    """Return logits [batch, vocab_size] after one more token of sequences that have `lengths` tokens so far."""
    lengths = torch.tensor(lengths)[:, None]
    attention_mask = torch.arange(int(lengths.max())) < lengths
    return _logits(model, torch.tensor(tokens)[:, None], attention_mask, lengths, seq_ids)


def run(
    model, sequences: torch.Tensor, prompt_lengths: Sequence[int], steps: int, seq_ids: Sequence[int] | None = None
) -> torch.Tensor:
    """Return logits [batch, 1 + steps, vocab_size] after each row's prompt and after each of `steps` more tokens."""
    model.reset()
    rows = list(zip(sequences, prompt_lengths, strict=True))
    logits = [prefill(model, [row[:length] for row, length in rows], seq_ids)]
    for step in range(steps):
        tokens = [int(row[length + step]) for row, length in rows]
        logits.append(decode(model, tokens, [length + step for length in prompt_lengths], seq_ids))
    return torch.stack(logits, dim=1)


def at(logits: torch.Tensor, prompt_lengths: Sequence[int], steps: int) -> torch.Tensor:
    """Select from whole sequences' logits [batch, length, vocab_size] those that `run` gives."""
    return torch.stack([row[length - 1 : length + steps] for row, length in zip(logits, prompt_lengths, strict=True)])


@contextmanager
def simulated_ranks(degree: int) -> Iterator[None]:
    """Set up ranks for NxD to trace and shard in: no process but this one, and parameters without values."""
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.trace.mock_torchdist import mock_distributed
    from neuronx_distributed.utils.model_utils import init_on_device

    before = dict(vars(parallel_state))
    with mock_distributed(degree), init_on_device(torch.device("meta"), force_custom_init_on_device=True):
        torch.distributed.init_process_group(backend="xla", rank=0, world_size=degree)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=degree, skip_collective_init=True)
        yield
    vars(parallel_state).update(before)


def _logits(model, input_ids, attention_mask, position_ids, seq_ids) -> torch.Tensor:
    output = model(
        input_ids=input_ids,
        attention_mask=attention_mask.long(),
        position_ids=position_ids,
        seq_ids=torch.arange(len(input_ids)) if seq_ids is None else torch.tensor(seq_ids),
    )
    return output.logits[:, -1].clone()
