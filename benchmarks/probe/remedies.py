"""Options of the backend torch and of the probe to try when a step of the probe fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.probe.process import OK, Record
from granite4_neuron.config.choices import EXPERTS_DECODE, KV_WRITES
from granite4_neuron.devices.torch.options import kv_write_of

# A form of the cache's write or of experts is advised if it takes less than this part of the default's time.
_MUCH_LESS = 0.67


@dataclass(frozen=True)
class Remedy:
    """A step, and an option that helps if it fails.

    other: a step whose success shows that the option works; None if there is none.
    """

    step: str
    option: str
    other: str | None = None


REMEDIES = (
    Remedy("states leading_view", "--no-prefill-by-view"),
    Remedy("operators mamba_prefill chunked", "--prefill-scan quadratic", "operators mamba_prefill quadratic"),
    Remedy("operators mamba_prefill chunked", "--prefill-scan ssd", "models kernels ssd"),
    Remedy("operators mamba_decode", "--decode-kernel nki", "models kernels ssd"),
    Remedy("operators experts_decode gather", "--experts-decode kernel", "operators experts_decode kernel"),
    Remedy("operators experts_decode gather", "--experts-decode all", "operators experts_decode all"),
    Remedy("operators experts_decode all", "--experts-decode kernel", "operators experts_decode kernel"),
    Remedy("operators experts_decode all", "--experts-decode gather", "operators experts_decode gather"),
    Remedy("models bucket 512", "--prefill-buckets 128", "models bucket 128"),
)


def advice(records: Sequence[Record]) -> list[str]:
    """Return a sentence for each option that these records suggest."""
    return [sentence for _, sentence in _advised(records)]


def advised_options(records: Sequence[Record]) -> list[str]:
    """Return the suggested options as words of a command; of several values of one, the first."""
    chosen: dict[str, str] = {}
    for option, _ in _advised(records):
        chosen.setdefault(option.split()[0], option)
    return [word for option in chosen.values() for word in option.split()]


def _advised(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return each suggested option with a sentence."""
    results = {record.name: record for record in records}
    return [*_kv_write(results), *_experts_decode(results), *_others(results)]


def _kv_write(results: Mapping[str, Record]) -> Iterator[tuple[str, str]]:
    steps = {form: results[name] for form in KV_WRITES if (name := f"states kv_write {form}") in results}
    times = {form: _time(record) for form, record in steps.items() if record.result == OK}
    default = kv_write_of(None, "neuron")
    if default not in steps or not times:
        return
    best = min(times, key=times.__getitem__)
    option = f"--kv-write {best}"
    if default not in times:
        yield option, f"{steps[default].name} is not right: try {option}."
    elif times[best] < _MUCH_LESS * times[default]:
        yield option, f"{option} takes {times[best] / times[default]:.2f} of the time of {default}: try it."


def _time(record: Record) -> float:
    """Return the milliseconds that the writes of decode take in the largest cache."""
    (times,) = (each.numbers["milliseconds"] for each in record.findings if each.what == "time of decode")
    return times[max(times, key=int)]


def _experts_decode(results: Mapping[str, Record]) -> Iterator[tuple[str, str]]:
    """Compare the forms for one token; a default that is wrong is one of `REMEDIES`."""
    steps = {form: results[name] for form in EXPERTS_DECODE if (name := f"operators experts_decode {form}") in results}
    times = {
        form: each.numbers["milliseconds"]
        for form, record in steps.items()
        for each in record.findings
        if record.result == OK and each.what == "time of 1 tokens"
    }
    default = "gather"  # `default_experts_decode` for one token
    if default in times:
        best = min(times, key=times.__getitem__)
        if times[best] < _MUCH_LESS * times[default]:
            option, part = f"--experts-decode {best}", times[best] / times[default]
            yield option, f"{option} takes {part:.2f} of the time of {default}: try it."


def _others(results: Mapping[str, Record]) -> Iterator[tuple[str, str]]:
    helped = set()
    for remedy in REMEDIES:
        failed = remedy.step in results and results[remedy.step].result != OK
        if not failed or remedy.step in helped or not _is_shown(results, remedy.other):
            continue
        helped.add(remedy.step)
        yield remedy.option, f"{remedy.step} is not right: try {remedy.option}."


def _is_shown(results: Mapping[str, Record], name: str | None) -> bool:
    """Return whether a step was right and compared something. Without NKI, steps of its kernels have only facts."""
    if name is None:
        return True
    record = results.get(name)
    return record is not None and record.result == OK and any(each.error is not None for each in record.findings)
