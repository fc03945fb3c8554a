"""Lower bound and prediction of a step's time on a Trainium. Nothing here is measured.

The bound is a roofline: HBM, TensorE, VectorE and the links between chips work at the same time, each at its full rate,
and the busiest decides. A real device loses time, which two constants describe here: the latency of a collective, and
the time to launch a layer's work. The prediction is the bound plus these losses.

Rates are of one logical core, which is two physical ones (LNC=2) and a quarter of a chip.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from granite4_neuron.config import MAMBA, ModelConfig
from granite4_neuron.config.choices import EXPERTS_DECODE
from granite4_neuron.devices.neuron.sdk import TRAINIUM2, Chip
from granite4_neuron.devices.selection import default_experts_decode
from granite4_neuron.errors import UserError
from granite4_neuron.model.parameters import matmul_weights
from granite4_neuron.planning.analysis import graphs
from granite4_neuron.planning.analysis.hlo_cost import Cost
from granite4_neuron.planning.analysis.live_set import live_set
from granite4_neuron.planning.analysis.roofline import minimum, minimum_of_commit

# Messages between the ranks on a chip use no link.
RANKS_PER_CHIP = Chip.logical_cores
# An all-reduce of less than 1 MB uses a mesh: it scatters and gathers, in two hops each, for any number of ranks; a hop
# takes 1 to 2 us: "Intra-node Collective Communications with AWS Neuron" in the Neuron SDK's documentation
# (neuron-runtime/explore/intranode-collective-comm).
COLLECTIVE_SECONDS = 4 * 2e-6
# The time of a layer besides its bound and its collectives: launches of its parts, and waits between them. Nothing is
# published about it. The value is the least squares fit of the logarithms of eight published times per token of other
# models, in `benchmarks/planning/predicted_latency.py`; a constant per step, fitted beside it, is zero.
LAUNCH_SECONDS = 157e-6

PARTS_OF_LAYER = 2  # a layer of the published models, and so of LAUNCH_SECONDS, has a mixer and a feed-forward part
MOVES_OF_FETCHED = 3  # weights that are fetched by index are read, written and read again
PARTITIONS = 128
CHUNK = 128  # tokens that the prefill kernel takes at a time


@dataclass(frozen=True)
class Work:
    """The work of one rank in one step.

    flops: of matrix products. bytes_accessed: in HBM. vector_elements: processed by VectorE in Mamba layers' kernels.
    link_bytes: bytes that a chip sends to others. collectives: their number. layers: launched layers of PARTS_OF_LAYER
    parts.
    """

    flops: float
    bytes_accessed: float
    vector_elements: float
    link_bytes: float
    collectives: int
    layers: float

    def __add__(self, other: Work) -> Work:
        """Return the work of two steps, one after the other."""
        return Work(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class Latency:
    """Seconds of one step: for each unit by itself, and for collectives and launches."""

    units: dict[str, float]
    losses: dict[str, float]

    @property
    def bound(self) -> float:
        """The lower bound in seconds: the time of the busiest unit."""
        return max(self.units.values())

    @property
    def predicted(self) -> float:
        return self.bound + sum(self.losses.values())

    @property
    def limit(self) -> str:
        """The largest part of the prediction: the busiest unit, "collectives" or "launches"."""
        busiest = max(self.units, key=self.units.__getitem__)
        parts = {busiest: self.bound, **self.losses}
        return max(parts, key=parts.__getitem__)


def hbm_bytes_per_second(chip: Chip) -> float:
    """Return a logical core's share."""
    return chip.hbm_bytes_per_second / chip.logical_cores


def latency(work: Work, chip: Chip = TRAINIUM2) -> Latency:
    """Return the roofline and the losses of a step."""
    units = {
        "HBM": work.bytes_accessed / hbm_bytes_per_second(chip),
        "TensorE": work.flops / (chip.tensor_flops / chip.logical_cores),
        "VectorE": work.vector_elements / chip.vector_elements_per_second,
        "links": work.link_bytes / chip.link_bytes_per_second,
    }
    losses = {"collectives": work.collectives * COLLECTIVE_SECONDS, "launches": work.layers * LAUNCH_SECONDS}
    return Latency(units, losses)


def num_collectives(parts: int, tp_degree: int) -> int:
    """Return the number of all-reduces in a step: one after each part of a layer."""
    return parts if tp_degree > 1 else 0


def link_bytes(parts: int, tokens: int, hidden_size: int, tp_degree: int, itemsize: int) -> float:
    """Return the bytes that a chip sends in a step: ring all-reduces of hidden states. The ranks of a chip share one
    copy.
    """
    chips = math.ceil(tp_degree / RANKS_PER_CHIP)
    ring = 2 * (chips - 1) / chips
    return parts * tokens * hidden_size * itemsize * ring


def step_work(
    config: ModelConfig,
    tp_degree: int,
    dtype: torch.dtype,
    batch_size: int,
    tokens: int,
    context: int,
    *,
    verifies: bool = False,
    experts_decode: str = "kernel",
    chip: Chip = TRAINIUM2,
) -> Work:
    """Return the work of a step, from `minimum`, the NKI kernels, and the bytes that move if a prompt does not fit into
    SBUF.

    The minimum reads each chosen expert once, as the kernel does. "all" multiplies every token with every expert, and
    "gather" reads, writes and reads again the weights of each choice; see `devices.selection`.

    The work of VectorE is that of this package's kernels. In decode: the decay and the update of every entry of the
    state, and a pass over the values read from it, which fills few partitions. In a verification: that pass, and two
    passes for each pair of tokens. In prefill, for each head and 128 tokens: the weights of 128 pairs, and three passes
    over the head.

    Raises:
        UserError: tp_degree does not divide the model.
    """
    least = minimum(config, tp_degree, dtype, batch_size, tokens, context, verifies=verifies)
    rank, parts = config.rank_dimensions(tp_degree), config.num_parts
    more_flops, more_bytes = _more_for_experts(config, tp_degree, dtype, batch_size * tokens, experts_decode)
    inner = batch_size * rank.mamba_heads * config.mamba_d_head
    if verifies:
        per_layer = inner * (PARTITIONS + 2 * tokens**2)
    elif tokens == 1:
        per_layer = inner * (PARTITIONS + 2 * config.mamba_d_state)
    else:
        chunks = batch_size * -(-tokens // CHUNK)
        per_layer = chunks * rank.mamba_heads * CHUNK * (CHUNK + 3 * config.mamba_d_head)
    return Work(
        flops=least.flops + more_flops,
        bytes_accessed=least.bytes_accessed
        + more_bytes
        + live_set(config, tp_degree, dtype, batch_size * tokens, chip).moved,
        vector_elements=config.layers_with(MAMBA) * per_layer,
        # Ranks add up float32.
        link_bytes=link_bytes(parts, batch_size * tokens, config.hidden_size, tp_degree, torch.float32.itemsize),
        collectives=num_collectives(parts, tp_degree)
        + config.layers_with(MAMBA) * config.has_collective_for_norms(tp_degree),
        layers=parts / PARTS_OF_LAYER,
    )


def prompt_work(
    config: ModelConfig, tp_degree: int, dtype: torch.dtype, pieces: Sequence[int], chip: Chip = TRAINIUM2
) -> Work:
    """Return the work of a prompt that runs in pieces of so many tokens, with padding.

    Raises:
        UserError: tp_degree does not divide the model.
    """
    starts = itertools.accumulate(pieces[:-1], initial=0)
    works = [step_work(config, tp_degree, dtype, 1, *piece, chip=chip) for piece in zip(pieces, starts, strict=True)]
    return sum(works[1:], works[0])


def _more_for_experts(
    config: ModelConfig, tp_degree: int, dtype: torch.dtype, tokens: int, form: str
) -> tuple[float, float]:
    """Return the FLOPs and bytes of a form of the experts beyond the minimum, which the kernel needs."""
    experts, chosen_by_token = config.num_local_experts, config.num_experts_per_tok
    if form == "kernel" or not experts:
        return 0.0, 0.0
    matrices = matmul_weights(config, tp_degree).values()
    weights = sum(one.numel for one in matrices if one.is_of_experts) / experts
    distinct = experts * (1 - (1 - chosen_by_token / experts) ** tokens)
    if form == "all":
        return 2.0 * weights * tokens * (experts - chosen_by_token), weights * dtype.itemsize * (experts - distinct)
    return 0.0, weights * dtype.itemsize * (MOVES_OF_FETCHED * tokens * chosen_by_token - distinct)


def commit_work(config: ModelConfig, tp_degree: int, dtype: torch.dtype, batch_size: int, tokens: int) -> Work:
    """Return the work of a verification's commit: only each Mamba layer's recurrence, launched as one part.

    Raises:
        UserError: tp_degree does not divide the model.
    """
    least = minimum_of_commit(config, tp_degree, dtype, batch_size, tokens)
    mamba_layers, heads = config.layers_with(MAMBA), config.rank_dimensions(tp_degree).mamba_heads
    return Work(
        flops=least.flops,
        bytes_accessed=least.bytes_accessed,
        vector_elements=2 * mamba_layers * batch_size * heads * config.mamba_d_head * config.mamba_d_state,
        link_bytes=0.0,
        collectives=0,
        layers=mamba_layers / PARTS_OF_LAYER,
    )


def counted_bound(cost: Cost, chip: Chip = TRAINIUM2) -> float:
    """Return the seconds of a graph by XLA's count, in which every operand of every instruction moves.

    A compiler avoids most of that by fusing. As far as bytes and arithmetic decide, the real time is between the bound
    of `latency` and this one.
    """
    flops_per_second = chip.tensor_flops / chip.logical_cores
    return max(cost.bytes_accessed / hbm_bytes_per_second(chip), cost.flops / flops_per_second)


@dataclass(frozen=True)
class Prediction:
    """One line of a prediction.

    tokens: per step and sequence, on average.
    counted: `counted_bound` of its graph in seconds, if it was counted.
    """

    step: str
    batch_size: int
    latency: Latency
    tokens: float = 1.0
    counted: float | None = None

    @property
    def seconds_per_token(self) -> float:
        return self.latency.predicted / self.tokens

    @property
    def tokens_per_second(self) -> float:
        return self.batch_size / self.seconds_per_token


def tokens_per_verification(drafted: int, acceptance: float) -> float:
    """Return the expected number of tokens of a verification of `drafted` drafts: the accepted drafts, and one token
    from the verification itself. Each draft is accepted with the same probability if those before it are.

    Source: Leviathan, Kalman and Matias 2023, equation 1.
    """
    return sum(acceptance**i for i in range(drafted + 1))


def predictions(
    config: ModelConfig,
    tp_degree: int,
    dtype: torch.dtype,
    prompt: int,
    context: int,
    batch_sizes: Sequence[int],
    drafted: int = 0,
    acceptance: float = 0.0,
    *,
    pieces: Sequence[int] | None = None,
    chip: Chip = TRAINIUM2,
) -> list[Prediction]:
    """Predict a prompt's first token, then a token at each batch size, without and with drafts from the text itself.

    A model with experts has a line for each form that they have in decode, of which one is the default without NKI
    kernels. Verifications are with the kernel.

    Args:
        tp_degree: ranks, one per logical core.
        prompt: tokens of the prompt.
        context: tokens of each sequence while it is continued.
        drafted, acceptance: number of drafts per verification, and the probability that one is accepted. A line is a
            verification with its commit; 0 drafts for no such lines. Drafts cost nothing here, because n-grams are
            looked up on the host.
        pieces: tokens of the graphs that the prompt runs in, in order; None for one of just this prompt.
        chip: that the ranks are on.

    Raises:
        UserError: tp_degree does not divide the model, or a number is out of range.
    """
    if not 0 <= acceptance <= 1:
        raise UserError(f"the acceptance is {acceptance}; it is a probability, from 0 to 1.")
    longest = config.max_position_embeddings
    if max(prompt, context) > longest:
        raise UserError(
            f"{max(prompt, context):,} tokens are asked for; the model's longest sequence is {longest:,} tokens."
        )

    work = prompt_work(config, tp_degree, dtype, pieces or (prompt,), chip)
    lines = [Prediction(f"first token, prompt of {prompt:,}", 1, latency(work, chip))]
    for batch_size in batch_sizes:
        for form, name in _decode_names(config, tp_degree, batch_size).items():
            work = step_work(config, tp_degree, dtype, batch_size, 1, context, experts_decode=form, chip=chip)
            lines.append(Prediction(name, batch_size, latency(work, chip)))
    gives = tokens_per_verification(drafted, acceptance)
    for batch_size in batch_sizes if drafted else ():
        work = step_work(config, tp_degree, dtype, batch_size, drafted + 1, context, verifies=True, chip=chip)
        work += commit_work(config, tp_degree, dtype, batch_size, drafted + 1)
        lines.append(Prediction(f"token, {drafted} drafted", batch_size, latency(work, chip), gives))
    return lines


def _decode_names(config: ModelConfig, tp_degree: int, batch_size: int) -> dict[str, str]:
    """Return the names of the steps of decode, by the form of their experts."""
    if not config.num_local_experts:
        return {"kernel": "token"}
    forms = [form for form in EXPERTS_DECODE if form != "kernel" or config.has_gated_mlp]  # as `devices.selection`
    default = default_experts_decode("torch", config, tp_degree, batch_size)
    return {form: f"token, experts: {form}{' (default)' if form == default else ''}" for form in forms}


def with_counted_graphs(
    lines: Sequence[Prediction],
    config: ModelConfig,
    tp_degree: int,
    dtype: torch.dtype,
    prompt: int,
    context: int,
    drafted: int,
    *,
    pieces: Sequence[int] | None = None,
    chip: Chip = TRAINIUM2,
) -> list[Prediction]:
    """Return `predictions` with counts of this package's own graphs: for the prompt, a token, verification and commit.

    The graph of a token has the default form of experts without NKI kernels.

    Raises:
        ToolsMissing: torch_xla or jax is not installed.
    """
    pieces = pieces or (prompt,)
    longest, verified = max(context, sum(pieces)) + 1, drafted + 1 if drafted else None
    counted: dict[tuple[str, int], float] = {}
    for batch_size in sorted({line.batch_size for line in lines}):
        traced = tuple(sorted(set(pieces))) if batch_size == 1 else ()
        reports = graphs.report(config, dtype, tp_degree, batch_size, traced, longest, verified)
        seconds = [counted_bound(report.cost, chip) for report in reports]
        of_prompt = [sum(seconds[at] * pieces.count(tokens) for at, tokens in enumerate(traced))] if traced else []
        names = _counted_steps(lines, config, tp_degree, batch_size)
        of_others = seconds[len(traced) :]
        last = len(names) - len(of_prompt) - 1  # a verification followed by its commit, if there are drafts
        bounds = [*of_prompt, *of_others[:last], sum(of_others[last:])]
        counted |= {(name, batch_size): bound for name, bound in zip(names, bounds, strict=True)}
    return [replace(line, counted=counted.get((line.step, line.batch_size))) for line in lines]


def _counted_steps(lines: Sequence[Prediction], config: ModelConfig, tp_degree: int, batch_size: int) -> list[str]:
    """Return the steps of a batch size that have a graph here: of the forms of experts the default one."""
    forms = _decode_names(config, tp_degree, batch_size).values()
    others = {name for name in forms if config.num_local_experts and not name.endswith("(default)")}
    return [line.step for line in lines if line.batch_size == batch_size and line.step not in others]
