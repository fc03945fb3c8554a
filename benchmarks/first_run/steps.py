"""The steps of a first run, for each Neuron SDK. Commands are lines of a shell, with names of places in braces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.probe.command import STEPS as PROBE

TORCH, NXDI = "2.33", "2.31"
SDKS = (TORCH, NXDI)

_IBM = "ibm-granite/granite-4.0-"
_SIZES = "--batch-size 1 8 --prompt-length 128 512"
_BUCKETS = "--max-context-length 512 --context-buckets 128 512 --token-buckets 4096"
_QUESTION = '"Why is the sky blue?" --temperature 0 --max-tokens 100'
# Seconds in which a step must be done; a compiler may take minutes for a graph.
_SHORT, _LONG, _LONGEST = 1800, 3 * 3600, 6 * 3600

# A step, the option of `compile` to use if it is not right, and the step that must be right for that.
REMEDIES_OF_NXDI = (
    ("text h-tiny", "--kernels nki", "text h-tiny, nki"),
    ("text h-tiny", "--expert-path nxd", "text h-tiny, nxd"),
)


@dataclass(frozen=True)
class Step:
    """A part of a first run.

    command: with {work}, {results} for files to send back, {options} that earlier steps advise, and {python}.
    minutes: how long it might take, by what others report of compilers; nobody has run it.
    limit: seconds after which it is stopped.
    needs: names of steps without whose success it is left out.
    expects: text that its output must have.
    is_probed: whether it prints findings, as a step of benchmarks.probe.
    """

    name: str
    command: str
    minutes: float
    limit: float = _SHORT
    needs: tuple[str, ...] = ()
    expects: str = ""
    is_probed: bool = False


def steps_of(sdk: str, has_h_small: bool, vllm: str | None = None) -> list[Step]:
    """Return an SDK's steps in order.

    Args:
        has_h_small: whether there are four cores for h-small.
        vllm: the program of vLLM in another environment of SDK 2.31; None to leave vLLM out.
    """
    steps = _torch(has_h_small) if sdk == TORCH else _nxdi(has_h_small, vllm)
    return list(steps)


def _torch(has_h_small: bool) -> Iterator[Step]:
    probe = "{python} -m benchmarks.probe --device neuron --step"
    for step in PROBE:
        if not (step.name.startswith("ranks") and not has_h_small):
            minutes = 2 if step.limit <= 600 else 8
            yield Step(step.name, f'{probe} "{step.name}"', minutes, step.limit, is_probed=True)
    backend = "--backend torch --device neuron {options}"
    program = "{python} -m granite4_neuron"
    yield Step(
        "text",
        f'{program} generate {backend} --temperature 0 "An assignment statement" --max-tokens 24',
        10,
        expects="evaluates the expression list",
    )
    yield Step("check", f"{program} check {backend} --dtype bfloat16", 10, _LONG, expects="passed")
    yield Step("check layers", f"{program} check {backend} --layers --dtype bfloat16", 10, _LONG, expects="passed")
    latency = "{python} benchmark_latency.py --random-weights"
    for model, minutes in (("h-350m", 20), ("h-tiny", 30)):
        yield Step(
            f"latency {model}", f"{latency} {model} {backend} {_SIZES} --json {{results}}/{model}.json", minutes, _LONG
        )
    if has_h_small:
        split = f"{backend} --tp-degree 4"
        file = "{results}/h-small.json"
        yield Step("latency h-small", f"{latency} h-small {split} {_SIZES} --json {file}", 60, _LONGEST)
        text = f"{program} generate --model {_IBM}h-small {split} --chat {_QUESTION} --verbose"
        yield Step("text h-small", text, 60, _LONGEST)
    server = f"{program} serve --model {_IBM}h-tiny {backend} --max-model-len 4096 --port {{port}}"
    yield Step("serve h-tiny", f"{{python}} -m benchmarks.first_run.server {server}", 30, _LONG)


def _nxdi(has_h_small: bool, vllm: str | None) -> Iterator[Step]:
    pytest, program = "{python} -m pytest", "{python} -m granite4_neuron"
    cpu = "test/integration/test_model.py test/unit/devices/neuron/nxdi/test_config.py test/unit/vllm/test_neuron.py"
    yield Step("CPU mode", f'env PJRT_DEVICE=CPU {pytest} {cpu} -k "not NeuronDevice"', 15, _LONG)
    yield Step("kernels", f"{pytest} test/integration/test_nki_device.py -v", 30, _LONG)
    yield Step("bundled model", f"{pytest} test/integration/test_model.py -k NeuronDevice -v -s", 30, _LONG)
    sizes = f"--tp-degree 4 --seq-len 4096 {_BUCKETS}"
    compiler = f"{program} compile {sizes} --model {_IBM}"
    for model, minutes in (("h-350m", 15), ("h-tiny", 25), *([("h-small", 60)] if has_h_small else [])):
        graphs = f"{{work}}/graphs/{model}"
        run = f"--model {_IBM}{model} --backend nxdi --compiled {graphs}"
        compiled = (f"compile {model}",)
        yield Step(compiled[0], f"{compiler}{model} --jobs 2 --output {graphs}", minutes, _LONGEST)
        yield Step(f"text {model}", _kept(model, f"{run} --chat {_QUESTION} --verbose"), 5, _LONG, compiled)
        times = f"--prompt-length 128 512 --output-length 128 --json {{results}}/{model}.json"
        yield Step(f"latency {model}", f"{{python}} benchmark_latency.py {run} {times}", 10, _LONG, compiled)
    drafts = f"--draft-model {_IBM}h-350m"
    for name, options, needs in (
        ("nki", "--kernels nki", ("kernels",)),
        ("nxd", "--expert-path nxd", ()),
        ("states", "--decode-kernel nki --state-dtype bfloat16", ("kernels",)),
        ("drafts", f"--verify 4 {drafts}", ()),
    ):
        graphs = f"{{work}}/graphs/h-tiny-{name}"
        compiled = (f"compile h-tiny, {name}",)
        yield Step(compiled[0], f"{compiler}h-tiny {options} --output {graphs}", 25, _LONGEST, needs)
        run = f"--model {_IBM}h-tiny --backend nxdi --compiled {graphs} --chat {_QUESTION} --verbose"
        if name != "drafts":
            yield Step(f"text h-tiny, {name}", _kept(f"h-tiny-{name}", run), 5, _LONG, compiled)
            continue
        # A text with drafts is the text without.
        needs = (*compiled, "text h-tiny")
        for drafter, words in (("drafts", f"{drafts} --draft-tokens 3"), ("ngram", "--speculate ngram:3")):
            command = _kept(f"h-tiny-{drafter}", f"{run} {words}", same_as="h-tiny")
            yield Step(f"text h-tiny, {drafter}", command, 5, _LONG, needs)
    if vllm is not None:
        buckets = '{{"context_encoding_buckets": [128, 512], "token_generation_buckets": [4096]}}'
        server = (
            f"{vllm} serve {_IBM}h-350m --tensor-parallel-size 4 --max-num-seqs 4 --max-model-len 4096 --port {{port}} "
            f"--no-enable-prefix-caching --additional-config '{{{{\"override_neuron_config\": {buckets}}}}}'"
        )
        yield Step("vLLM", f"{{python}} -m benchmarks.first_run.server {server}", 30, _LONG)


def _kept(name: str, words: str, same_as: str | None = None) -> str:
    """Return the command that generates with these words and keeps the text, which must be that of `same_as`."""
    same = "" if same_as is None else f" --same-as {{results}}/{same_as}.txt"
    kept = f"{{python}} -m benchmarks.first_run.text {{results}}/{name}.txt{same}"
    return f"{kept} -- {{python}} -m granite4_neuron generate {words}"
