"""Implementations in the comparison of texts: each serves groups of prompts in a given way."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import transformers

from benchmarks.errors import Failed
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.torch.runtime import TorchRuntime
from granite4_neuron.devices.xla.runtime import XLARuntime
from granite4_neuron.engine import Engine, PrefixCache, Request
from granite4_neuron.engine.drafting.drafters import DraftRequest
from granite4_neuron.model.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.ops import TORCH
from granite4_neuron.runtime.interface import Runtime

OURS = "this package"
# The dtype, and how weights are quantized.
NUMBERS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None), "int8": ("bfloat16", "int8")}
DRAFT_TOKENS = 3
SAMPLED: Sequence[dict[str, Any]] = (
    dict(temperature=0.7, top_p=0.95),
    dict(temperature=1.0),
    dict(temperature=1.2, top_k=50, min_p=0.02),
    dict(temperature=0.9, typical_p=0.8, repetition_penalty=1.1, presence_penalty=0.5),
)
Groups = Sequence[Sequence[Sequence[int]]]


class Row(NamedTuple):
    """A token, and its log-probability; None if the implementation does not report it."""

    token: int
    logprob: float | None


Text = Sequence[Row]


@dataclass(frozen=True)
class Way:
    """A way to serve: the number of sequences at a time, whether prompts run in chunks (of a third), whether their
    first half comes from a cache, whether drafts are verified, and the number of threads.

    drafts: None without a drafter; False with one that never proposes anything.
    sampled: whether texts are sampled, with options and a seed that follow from the prompt.
    """

    name: str
    batch: int = 1
    in_chunks: bool = False
    from_cache: bool = False
    drafts: bool | None = None
    threads: int = 1
    sampled: bool = False


class Served(Protocol):
    """An implementation."""

    def serve(self, way: Way, groups: Groups) -> list[Text]:
        """Serve the groups one after another, and the prompts of a group at the same time. Return their texts.

        Raises:
            Failed: the implementation cannot do this.
        """

    def close(self) -> None:
        """End it."""


class Ours:
    """This package's engine."""

    def __init__(self, folder: Path, numbers: str, options: argparse.Namespace):
        dtype, quantize = NUMBERS[numbers]
        self._is_cpu = options.backend == "cpu"
        if quantize is not None and not self._is_cpu:
            raise Failed(f"{quantize} weights are compared on the CPU's own backend only.")
        operators = cpu.choose_operators() if self._is_cpu else TORCH
        model = load_model(folder, getattr(torch, dtype), quantize=quantize, operators=operators)
        self._runtime = RUNTIMES[options.backend](model, options)
        self._chunk, self._slots, self._new = chunk_of(options), options.slots, options.output_length
        self._known: dict[tuple[int, ...], list[int]] = {}

    def serve(self, way: Way, groups: Groups) -> list[Text]:
        if way.threads != 1 and not self._is_cpu:
            raise Failed("the number of threads belongs to the device.")
        with _threads(way.threads):
            texts = [text for group in groups for text in self._group(way, group)]
        for prompt, text in zip(itertools.chain.from_iterable(groups), texts, strict=True):
            self._known[tuple(prompt)] = [row.token for row in text]
        return texts

    def _group(self, way: Way, group: Sequence[Sequence[int]]) -> list[Text]:
        runtime = self._runtime
        cache = PrefixCache(runtime, None, runtime.tokens_per_step) if way.from_cache else None
        drafter = None
        if way.drafts is not None:
            drafter = _Knowing(self._known if way.drafts else {}, runtime.config.vocab_size)
        length = max(map(len, group)) + self._new
        options = dict(max_length=length, prefix_cache=cache, drafter=drafter, draft_tokens=DRAFT_TOKENS)
        engine = Engine(runtime, self._slots or len(group), **options)
        if cache is not None:
            _finish(engine, [Request(self._beginning(prompt), 1) for prompt in group])
        texts = _finish(engine, [self._request(prompt, way) for prompt in group])
        check_way(way, engine.stats.cached_tokens, engine.stats.drafted_tokens)
        return texts

    def _request(self, prompt: Sequence[int], way: Way) -> Request:
        cuts = range(self._chunk, len(prompt), self._chunk) if way.in_chunks else ()
        seed = sum(prompt)
        options = dict(temperature=0, logprobs=0)
        if way.sampled:  # a device does not draw tokens whose log-probabilities are asked for
            options = SAMPLED[seed % len(SAMPLED)] | dict(seed=seed, logprobs=0 if self._is_cpu else None)
        return Request(prompt, self._new, snapshots_at=cuts, **options)

    def _beginning(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return the beginning of a prompt that a cache holds: half of it, or more if it may not be cut so early."""
        half = half_of(prompt)
        return half if self._runtime.prompt_cuts.last(len(half), len(prompt)) else prompt[:-1]

    def close(self) -> None:
        pass


def _cpu(model: GraniteMoeHybridForCausalLM, options: argparse.Namespace) -> Runtime:
    return CPURuntime(model, transformers.GenerationConfig())


def _torch(model: GraniteMoeHybridForCausalLM, options: argparse.Namespace) -> Runtime:
    choices = dict(device=options.device, compiler=options.compiler, batch_invariant=options.batch_invariant)
    return TorchRuntime(model, transformers.GenerationConfig(), **choices)


def _xla(model: GraniteMoeHybridForCausalLM, options: argparse.Namespace) -> Runtime:
    return XLARuntime(model, transformers.GenerationConfig())


RUNTIMES = {"cpu": _cpu, "torch": _torch, "xla": _xla}


class _Knowing:
    """A drafter that knows the texts and gets every third token wrong."""

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int):
        self._texts, self._vocab_size = texts, vocab_size

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._propose(request.tokens, request.most) for request in requests]

    def _propose(self, tokens: Sequence[int], most: int) -> list[int]:
        if not self._texts:
            return []
        [(prompt, text)] = ((each, text) for each, text in self._texts.items() if tuple(tokens[: len(each)]) == each)
        done = len(tokens) - len(prompt)
        places = range(done, min(done + most, len(text)))
        return [(text[place] + (place % 3 == 2)) % self._vocab_size for place in places]

    def end(self, id: int) -> None:
        pass


class Transformers:
    """transformers' model, one cached forward pass per step."""

    def __init__(self, folder: Path, numbers: str, options: argparse.Namespace):
        dtype, quantize = NUMBERS[numbers]
        if quantize is not None:
            raise Failed(f"it has no {quantize} weights of this kind.")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._device = options.device if options.backend == "torch" else "cpu"
        self._model = model.eval().to(self._device)
        self._chunk, self._new = chunk_of(options), options.output_length

    def serve(self, way: Way, groups: Groups) -> list[Text]:
        if way.drafts:
            raise Failed("it refuses drafts for models with recurrent states.")
        try:
            with _threads(way.threads), torch.inference_mode():
                return [text for group in groups for text in self._group(way, torch.tensor(group, device=self._device))]
        except torch.OutOfMemoryError as error:
            raise Failed(f"{error}".split(". GPU", 1)[0] + ".") from None

    def _group(self, way: Way, prompts: torch.Tensor) -> list[Text]:
        length = prompts.shape[1]
        *first, tokens = prompts.split(
            self._chunk if way.in_chunks else length // 2 if way.from_cache else length, dim=1
        )
        cache, rows = None, []
        for piece in first:
            cache = self._model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        for _ in range(self._new):
            output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logprobs = output.past_key_values, output.logits[:, -1].float().log_softmax(-1)
            largest, chosen = logprobs.max(-1)
            rows.append([Row(*row) for row in zip(chosen.tolist(), largest.tolist(), strict=True)])
            tokens = chosen[:, None]
        return [list(text) for text in zip(*rows, strict=True)]

    def close(self) -> None:
        pass


class VLLM:
    """vLLM without this package's plugin, in one process for each combination of options."""

    plugins = ""

    def __init__(self, folder: Path, numbers: str, options: argparse.Namespace):
        if importlib.util.find_spec("vllm") is None:
            raise Failed("it is not installed in this environment.")
        dtype, quantize = NUMBERS[numbers]
        if quantize is not None:
            raise Failed(f"it has no {quantize} weights of this kind.")
        self._job = dict(model=str(folder), dtype=dtype, new=options.output_length)
        self._length, self._chunk = options.prompt_length + options.output_length + 8, chunk_of(options)
        self._started: tuple[object, subprocess.Popen] | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it is closed with this object)

    def serve(self, way: Way, groups: Groups) -> list[Text]:
        process = self._process(way)
        # The first prompts fill the cache.
        first = [list(map(half_of, group)) for group in groups] if way.from_cache else []
        try:
            process.stdin.write(json.dumps([*first, *groups]) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline() or "null")
        except BrokenPipeError:
            answer = None
        if answer is None:
            self._log.seek(0)
            lines = [line.strip() for line in self._log.read().splitlines() if "Error" in line]
            raise Failed(lines[-1].removeprefix("[rank0]: ") if lines else "its process ended.")
        check_way(way, answer["cached"], answer["drafts"])
        texts = [[Row(*row) for row in text] for text in answer["texts"]]
        return texts[sum(map(len, first)) :]

    def _process(self, way: Way) -> subprocess.Popen:
        # A step has at least a token for each sequence.
        tokens, sequences = (self._chunk, 1) if way.in_chunks else (8192, 32)
        options = dict(max_num_batched_tokens=tokens, max_num_seqs=sequences)
        options |= dict(enable_prefix_caching=way.from_cache, max_model_len=self._length)
        if way.drafts:
            lookup = dict(prompt_lookup_min=1, prompt_lookup_max=DRAFT_TOKENS)
            options |= dict(speculative_config=dict(method="ngram", num_speculative_tokens=DRAFT_TOKENS, **lookup))
        key = (options, way.threads)
        if self._started is not None and self._started[0] == key:
            return self._started[1]
        self._end()
        environment = os.environ | dict(OMP_NUM_THREADS=str(way.threads), VLLM_CPU_OMP_THREADS_BIND="nobind")
        environment |= dict(VLLM_PLUGINS=self.plugins, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.one_text.vllm_process", json.dumps(self._job | dict(options=options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._started = key, process
        return process

    def _end(self) -> None:
        if self._started is not None:
            self._started[1].kill()
            self._started[1].communicate()
            self._started = None
            self._log.truncate(0)

    def close(self) -> None:
        self._end()
        self._log.close()


class VLLMWithPlugin(VLLM):
    """vLLM with this package's plugin."""

    plugins = "granite4_neuron_cpu"


def chunk_of(options: argparse.Namespace) -> int:
    """Return how many tokens of a prompt run in a step if it runs in chunks."""
    return max(1, options.prompt_length // 3 + 1)


def half_of(prompt: Sequence[int]) -> Sequence[int]:
    """Return the beginning of a prompt that a cache holds."""
    return prompt[: len(prompt) // 2]


def _finish(engine: Engine, requests: Sequence[Request]) -> list[Text]:
    texts: dict[int, list[Row]] = {engine.add(request): [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            texts[output.id].append(Row(output.token, output.logprob.logprob if output.logprob else 0.0))
    return list(texts.values())


def check_way(way: Way, cached: int, drafts: int) -> None:
    """
    Raises:
        Failed: the texts were not served in this way.
    """
    if way.from_cache and not cached:
        raise Failed("there was no hit; its blocks may be longer than half of a prompt.")
    if way.drafts and not drafts:
        raise Failed("it found no drafts in these texts.")


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
