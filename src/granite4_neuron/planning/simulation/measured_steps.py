"""Step times measured on a machine, and the file that stores them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from granite4_neuron.config import config_from_dict
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.config.json_files import FileFormat, read_object, write_json
from granite4_neuron.errors import UserError
from granite4_neuron.planning.simulation.step_times import Curve, CurvesByRows
from granite4_neuron.runtime.interface import Row
from granite4_neuron.runtime.prompt_cuts import from_json


@dataclass(frozen=True)
class Measured:
    """The contents of a file of step times.

    model, backend, machine: their names. dtype: of activations and cache. state_dtype: of SSM states.
    sampling: options of the sequences, such as "temperature".
    config: the model's, as in config.json.
    tokens_per_step, rows_per_step, packs_rows, max_length: the runtime's.
    prompt_cuts: the runtime's, as `runtime.prompt_cuts.as_json` returns them.
    decode: rows, tokens of each sequence before the step, seconds of a step with one token of each.
    prompts: rows, tokens of each, seconds of a step at the beginning of prompts.
    contexts: tokens of a prompt before the step, seconds of a step with `tokens_per_step` further tokens.
    snapshots, restores: tokens, seconds.
    """

    model: str
    dtype: str
    state_dtype: str
    backend: str
    machine: str
    sampling: Mapping[str, float]
    config: dict[str, Any]
    tokens_per_step: int
    rows_per_step: int
    prompt_cuts: Sequence[Any]
    packs_rows: bool
    max_length: int
    decode: Sequence[tuple[int, int, float]]
    prompts: Sequence[tuple[int, int, float]]
    contexts: Sequence[tuple[int, float]]
    snapshots: Sequence[tuple[int, float]]
    restores: Sequence[tuple[int, float]]

    def save(self, file: Path) -> None:
        """Write a file; raise UserError if it cannot be written."""
        write_json(file, _lines(FORMAT.header | asdict(self)))

    @classmethod
    def load(cls, file: Path) -> Measured:
        """Read a file that `save` wrote.

        Raises:
            UserError: it cannot be read, or is not such a file.
        """
        if not file.exists():
            raise UserError(f"{file} does not exist; granite4-neuron measure writes a file of step times.")
        values = read_object(file)
        FORMAT.check(file, values)
        config_from_dict(values["config"], source=str(file))
        return cls(**{name: values[name] for name in FORMAT.fields})


class MeasuredSteps:
    """`StepTimes` by interpolation and extrapolation of measured times.

    A step of single tokens takes the time for its number of rows at their mean length. A step of prompts takes the time
    for its rows at their mean length, or at the longest length if rows are padded, plus the time of each row's
    attention to earlier tokens. A step of both reads the weights once: it takes the time of its prompts plus the
    additional time of the single tokens.
    """

    def __init__(self, measured: Measured):
        self._packs_rows = measured.packs_rows
        self._decode_curves = CurvesByRows(_by_rows(measured.decode))
        self._prompts = CurvesByRows(_by_rows(measured.prompts))
        first = min(measured.contexts)[1] if measured.contexts else 0.0
        per_token = {context: (seconds - first) / measured.tokens_per_step for context, seconds in measured.contexts}
        self._attention = Curve(per_token or {0: 0.0})
        self._snapshots, self._restores = Curve(dict(measured.snapshots)), Curve(dict(measured.restores))

    def step(self, rows: Sequence[Row]) -> float:
        starts: list[int] = []
        lengths: list[int] = []
        seconds = 0.0
        for row in rows:
            if (length := len(row.tokens)) == 1 and row.start > 0:
                starts.append(row.start)
            else:
                lengths.append(length)
                seconds += length * self._attention(row.start)
        if not lengths:
            return self._decode_curves[len(starts)](sum(starts) / len(starts))
        seconds += self._prompts[len(lengths)](sum(lengths) / len(lengths) if self._packs_rows else max(lengths))
        if starts:
            alone = self._decode_curves[1](0.0)
            seconds += max(0.0, self._decode_curves[len(starts) + 1](sum(starts) / len(starts)) - alone)
        return seconds

    def decode(self, starts: Sequence[int], steps: int) -> list[float]:
        return self._decode_curves[len(starts)].from_on(sum(starts) / len(starts), steps)

    def snapshot(self, tokens: int) -> float:
        return self._snapshots(tokens)

    def restore(self, tokens: int) -> float:
        return self._restores(tokens)

    def copy(self, tokens: int) -> float:
        """A copy reads and writes as much as a snapshot."""
        return self._snapshots(tokens)


def _by_rows(table: Sequence[tuple[int, int, float]]) -> dict[int, dict[int, float]]:
    points: dict[int, dict[int, float]] = {}
    for rows, x, seconds in table:
        points.setdefault(rows, {})[x] = seconds
    return points


def _are_options(value: Any) -> bool:
    return isinstance(value, dict) and "temperature" in value and all(map(_is_amount, value.values()))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _are_cuts(value: Any) -> bool:
    try:
        from_json(value)
    except ValueError:
        return False
    return True


def _is_table(columns: int, least_lines: int = 1):
    def is_right(value: Any) -> bool:
        return isinstance(value, list) and len(value) >= least_lines and all(map(is_line, value))

    def is_line(line: Any) -> bool:
        if not isinstance(line, list) or len(line) != columns:
            return False
        *counts, seconds = line
        return all(type(each) is int and each >= 0 for each in counts) and _is_amount(seconds)

    return is_right


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


FORMAT = FileFormat(
    "granite4-neuron step times",
    version=3,
    fields={
        "model": _is_text,
        "dtype": DTYPES.__contains__,
        "state_dtype": DTYPES.__contains__,
        "backend": _is_text,
        "machine": _is_text,
        "sampling": _are_options,
        "config": lambda value: isinstance(value, dict),
        "tokens_per_step": _is_count,
        "rows_per_step": _is_count,
        "prompt_cuts": _are_cuts,
        "packs_rows": lambda value: isinstance(value, bool),
        "max_length": _is_count,
        "decode": _is_table(3),
        "prompts": _is_table(3),
        "contexts": _is_table(2, least_lines=0),
        "snapshots": _is_table(2),
        "restores": _is_table(2),
    },
    what="a file of step times; granite4-neuron measure writes one",
    remedy="measure the step times again",
)


def _lines(values: Mapping[str, Any]) -> str:
    """Return JSON with a line for each field, and for each line of a table."""

    def text(value: Any) -> str:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):
            return "[\n" + ",\n".join(f"  {json.dumps(line)}" for line in value) + "\n ]"
        return json.dumps(value)

    return "{\n" + ",\n".join(f' "{name}": {text(value)}' for name, value in values.items()) + "\n}\n"
