"""The cost of the NKI kernels on NeuronCore-v3, from a model of its engines. Nothing is timed or run on a device.

    python -m benchmarks.kernels
    python -m benchmarks.kernels --model granite-4.0-h-tiny --json kernels.json

The kernels run in the NKI emulator, for one rank of a tensor parallel model in bfloat16, on the two physical cores of a
logical core (LNC=2). The report has, for one core, the instructions of each engine, and the time that each engine, DMA
and HBM need by themselves. The longest time is a lower bound. DMA moves elements that are contiguous on both sides. An
element under 512 bytes takes as long as one of 512, and AWS asks for 2 KiB or more. VectorE's rates are those that AWS
documents for each instruction: two cycles for an element of two tiles in SBUF, one if a tile is in PSUM.

The report also divides the bytes moved by the bytes of reading each argument and writing each result once. The experts
of each token are random. Only weights of chosen experts count as arguments. In prefill each choice counts one token and
one result.

Prefill of more than 256 tokens is extrapolated from 128 and 256: every further 128 tokens take the same instructions.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.errors import reports_errors
from granite4_neuron import UserError
from granite4_neuron.commands.options import check_folder_of
from granite4_neuron.commands.output import print_table
from granite4_neuron.config import GraniteMoeHybridConfig, ModelConfig
from granite4_neuron.config.json_files import write_json
from granite4_neuron.config.published import published_values
from granite4_neuron.devices.neuron.expert_blocks import expert_blocks
from granite4_neuron.devices.neuron.expert_slots import expert_slots
from test.support.nki_cases import conv_inputs, mamba_decode_inputs, mamba_prefill_inputs, nbytes, scan_inputs
from test.support.nki_emulator import provide_nki

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "dma")
ENGINE_NAMES = ("PE", "DVE", "ACT", "Pool", "DMA")
# One NeuronCore-v3: cycles per microsecond, and cycles before an instruction's first element.
CLOCK = dict(tensor=2400, vector=960, scalar=1200, gpsimd=1200)
START_CYCLES = dict(vector=60, scalar=60, gpsimd=100)
HBM_BYTES_PER_MICROSECOND = 2.9e6 / 8
DMA_BYTES_PER_MICROSECOND = 16 * 23e3  # all 16 engines together
DMA_COSTS_AT_LEAST, DMA_SHOULD_HAVE = 512, 2048  # bytes per element
SHORTEST_PRODUCT = 64  # columns
FLOAT32_PASSES, FLOAT32_ONEZERO_PASSES = 4, 2  # the smaller one if an operand is declared to be ones and zeros

BLOCK = 128
PROMPT_LENGTHS = (128, 1024, 8192)
EXPERT_PROMPT_LENGTHS = (512, 2048)
BATCH_SIZES = (1, 4, 8)
VERIFIED_TOKENS = 4
PROGRAMS = 2


@dataclass(frozen=True)
class Cost:
    """The cost of a launch on its first core; minimum_bytes and hbm_bytes are of all cores. Times in microseconds."""

    instructions: Counter
    microseconds: Counter  # by engine, and "hbm"
    dma_elements: Counter  # by their bytes
    hbm_bytes: int
    minimum_bytes: int

    def extended(self, longer: Cost, times: int) -> Cost:
        """Return this cost plus `times` the difference between `longer` and this."""

        def extend(short: Counter, long: Counter) -> Counter:
            return Counter({key: short[key] + times * (long[key] - short[key]) for key in short | long})

        return Cost(
            extend(self.instructions, longer.instructions),
            extend(self.microseconds, longer.microseconds),
            extend(self.dma_elements, longer.dma_elements),
            self.hbm_bytes + times * (longer.hbm_bytes - self.hbm_bytes),
            self.minimum_bytes + times * (longer.minimum_bytes - self.minimum_bytes),
        )


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    kernel: str
    shape: str
    instructions: dict[str, int]
    microseconds: dict[str, float]
    dma_elements: int
    dma_elements_under_512: int
    dma_elements_under_2048: int
    bound: str
    bound_microseconds: float
    hbm_bytes: int
    traffic_ratio: float


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit code."""
    options = _parser().parse_args(arguments)
    check_folder_of(options.json)
    rows = list(report(options.model, options.tp_degree))
    _print(rows, f"{options.model}, one rank of {options.tp_degree}, bfloat16; one core of {PROGRAMS}")
    if options.json:
        write_json(options.json, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


def report(model: str, tp_degree: int) -> Iterator[Row]:
    """Yield the report's lines for one model of the family.

    Raises:
        UserError: the model has no Mamba layers, or the emulator is not installed.
    """
    require_emulator()
    from granite4_neuron.devices.neuron.nki.conv1d_prefill import conv1d_prefill
    from granite4_neuron.devices.neuron.nki.mamba_decode import mamba_decode
    from granite4_neuron.devices.neuron.nki.mamba_prefill import mamba_prefill
    from granite4_neuron.devices.neuron.nki.ssd_chunk_scan import ssd_chunk_scan
    from granite4_neuron.devices.neuron.nki.tensor_tensor_scan import tensor_tensor_scan

    config = GraniteMoeHybridConfig.from_dict(published_values(model), source=model)
    if "mamba" not in config.layer_types:
        raise UserError(f"{model} has no Mamba layers; choose a model whose name has an h.")
    rank = config.rank_dimensions(tp_degree)
    heads = dict(
        heads=rank.mamba_heads,
        head_dim=config.mamba_d_head,
        groups=rank.mamba_groups,
        d_state=config.mamba_d_state,
        dtype=torch.bfloat16,
    )
    channels = dict(channels=rank.mamba_conv_dim, d_conv=config.mamba_d_conv, dtype=torch.bfloat16)

    for kernel in (ssd_chunk_scan, tensor_tensor_scan):
        yield from _prefill(kernel, lambda length: list(scan_inputs(1, length, **heads).values()))
    yield from _prefill(conv1d_prefill, lambda length: list(conv_inputs(1, length, **channels).values()))
    yield from _prefill(mamba_prefill, lambda length: list(mamba_prefill_inputs(1, length, **heads).values()))
    dimensions = {name: value for name, value in heads.items() if name != "dtype"}
    for tokens in (1, VERIFIED_TOKENS):
        for batch in BATCH_SIZES:
            arguments = mamba_decode_inputs(batch, tokens, dtype=torch.bfloat16, **dimensions)
            cost = cost_of(mamba_decode, list(arguments.values()))
            yield _row(mamba_decode, f"batch {batch}, tokens {tokens}", cost)
    if config.num_local_experts:
        yield from experts(config, rank.intermediate_size)


def experts(config: ModelConfig, width: int) -> Iterator[Row]:
    """Return the report's lines for the experts. `width` is an expert's width on one rank."""
    from granite4_neuron.devices.neuron.nki.experts_decode import experts_decode
    from granite4_neuron.devices.neuron.nki.experts_prefill import experts_prefill

    num_experts, hidden, dtype = config.num_local_experts, config.hidden_size, torch.bfloat16
    weights = (
        torch.zeros(num_experts, hidden, 2 * width, dtype=dtype),
        torch.zeros(num_experts, width, hidden, dtype=dtype),
    )

    def row(kernel: Callable, shape: str, tokens: int, topk_ids: torch.Tensor, *layout: torch.Tensor) -> Row:
        cost = cost_of(kernel, [torch.zeros(tokens, hidden, dtype=dtype), *weights, *layout])
        distinct = topk_ids.unique().numel()
        rows = tokens if kernel is experts_decode else topk_ids.numel()
        minimum = experts_hbm_bytes(rows, distinct, hidden, width, dtype.itemsize)
        return _row(kernel, f"{shape}, {distinct} experts", replace(cost, minimum_bytes=minimum))

    for batch in (*BATCH_SIZES, BLOCK):
        topk_weights, topk_ids = random_choices(batch, config)
        yield row(experts_decode, f"batch {batch}", batch, topk_ids, *expert_slots(topk_ids, topk_weights, num_experts))
    for length in EXPERT_PROMPT_LENGTHS:
        _, topk_ids = random_choices(length, config)
        yield row(experts_prefill, f"length {length}", length, topk_ids, *expert_blocks(topk_ids, num_experts))


def experts_hbm_bytes(tokens: int, distinct: float, hidden_size: int, width: int, itemsize: int) -> float:
    """Return the bytes of the weights of `distinct` experts, of the tokens, and of their results, each moved once.

    Args:
        width: a rank's share of the experts' width.
        itemsize: bytes per element of weights and tokens.
    """
    return itemsize * hidden_size * (3 * width * distinct + 2 * tokens)


def random_choices(tokens: int, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and experts that random tokens choose."""
    logits = torch.rand(tokens, config.num_local_experts, generator=torch.Generator().manual_seed(0))
    return logits.topk(config.num_experts_per_tok)


def _prefill(kernel: Callable, inputs: Callable[[int], list[torch.Tensor]]) -> Iterator[Row]:
    one, two = (cost_of(kernel, inputs(blocks * BLOCK)) for blocks in (1, 2))
    for length in PROMPT_LENGTHS:
        yield _row(kernel, f"length {length}", one.extended(two, length // BLOCK - 1))


def cost_of(kernel: Callable, arguments: list[torch.Tensor]) -> Cost:
    """Run the kernel in the emulator and add up its instructions."""
    from nki.emulation import last_launch

    from granite4_neuron.devices.neuron.nki.launch import launch

    outputs = launch(kernel, *arguments, programs=PROGRAMS)
    instructions, microseconds = Counter(dict.fromkeys(ENGINES, 0)), Counter(dict.fromkeys(ENGINES, 0.0))
    elements: Counter[int] = Counter()
    hbm_bytes = last_launch().hbm_bytes
    microseconds["hbm"] = hbm_bytes / PROGRAMS / HBM_BYTES_PER_MICROSECOND
    for instruction in last_launch().instructions:
        if instruction.program > 0:
            continue
        engine = instruction.engine
        instructions[engine] += 1
        if engine == "dma":
            elements.update(dict(instruction.dma_elements))
        elif engine == "tensor":
            passes = FLOAT32_ONEZERO_PASSES if instruction.has_onezero else FLOAT32_PASSES
            columns = max(instruction.elements, SHORTEST_PRODUCT) * (passes if instruction.is_float32 else 1)
            microseconds[engine] += columns / CLOCK[engine]
        else:
            cycles = instruction.elements * instruction.cycles_per_element
            microseconds[engine] += (START_CYCLES[engine] + cycles) / CLOCK[engine]
    moved = sum(count * max(size, DMA_COSTS_AT_LEAST) for size, count in elements.items())
    microseconds["dma"] = moved / DMA_BYTES_PER_MICROSECOND
    return Cost(instructions, microseconds, elements, hbm_bytes, nbytes(*arguments, *outputs))


def _row(kernel: Callable, shape: str, cost: Cost) -> Row:
    bound = max(cost.microseconds, key=cost.microseconds.get)

    def elements_under(limit: int) -> int:
        return sum(count for size, count in cost.dma_elements.items() if size < limit)

    return Row(
        kernel=kernel.function.__name__,
        shape=shape,
        instructions=dict(cost.instructions),
        microseconds=dict(cost.microseconds),
        dma_elements=cost.dma_elements.total(),
        dma_elements_under_512=elements_under(DMA_COSTS_AT_LEAST),
        dma_elements_under_2048=elements_under(DMA_SHOULD_HAVE),
        bound=bound,
        bound_microseconds=cost.microseconds[bound],
        hbm_bytes=cost.hbm_bytes,
        traffic_ratio=cost.hbm_bytes / cost.minimum_bytes,
    )


def _print(rows: list[Row], title: str) -> None:
    table = Table(title=f"{title}\nmodelled, not timed; times in microseconds, each engine by itself")
    table.add_column("kernel")
    table.add_column("shape")
    for column in (*ENGINE_NAMES, "elements", "< 512 B", "< 2 KiB", *(f"{name} us" for name in (*ENGINE_NAMES, "HBM"))):
        table.add_column(column, justify="right")
    table.add_column("bound")
    for column in ("HBM MB", "of minimum"):
        table.add_column(column, justify="right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.kernel != row.kernel:
            table.add_section()
        us = row.microseconds
        table.add_row(
            row.kernel,
            row.shape,
            *(str(row.instructions[engine]) for engine in ENGINES),
            *map(str, (row.dma_elements, row.dma_elements_under_512, row.dma_elements_under_2048)),
            *(f"{us[name]:.1f}" for name in (*ENGINES, "hbm")),
            f"{row.bound} {row.bound_microseconds:.1f}",
            f"{row.hbm_bytes / 1e6:.2f}",
            f"{row.traffic_ratio:.2f}x",
        )
    print_table(table)
    print("PE is TensorE, DVE VectorE, ACT ScalarE, Pool GpSimd; the first five columns are instructions.")
    print("elements: contiguous pieces that DMA moves, and how many of them are smaller than 512 and than 2,048 bytes.")


def require_emulator() -> None:
    """Make `nki` the emulator.

    Raises:
        UserError: it is the SDK's, or the emulator cannot be imported.
    """
    provide_nki()
    try:
        import nki.emulation  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"the NKI emulator is not installed ({error}): install the extra dev, without the Neuron SDK."
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="granite-4.0-h-small", metavar="NAME", help="default: granite-4.0-h-small")
    parser.add_argument("--tp-degree", type=int, default=4, metavar="N", help="ranks of the model, default: 4")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    return parser
