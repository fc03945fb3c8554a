"""A few lines add a sampling option or an option of the cpu backend. A copy of the package gets both.

No other file of the package changes. The changed files are those that docs/extending.md names.
"""

import json
import re

import pytest

from test.support.package_copy import ROOT, PackageCopy

# The line in each file that the new lines follow, and the new lines.
SAMPLING_OPTION = {
    "engine/sampling_params.py": (
        r"    min_p: float \| None = .*\n",
        "    top_n_sigma: float | None = _warper(\n"
        '        lambda value: is_number(value) and value > 0, "a number above 0"\n'
        "    )\n",
    ),
    "engine/sampling.py": (
        r"        self._processors = .*\n",
        "        if (sigmas := params.top_n_sigma) is not None:\n"
        "            def top_n_sigma(tokens, scores):\n"
        "                finite = scores[scores > -math.inf]\n"
        "                return torch.where(scores >= finite.max() - sigmas * finite.std(), scores, -math.inf)\n\n"
        "            self._processors.append(_RequestsProcessor(top_n_sigma))\n",
    ),
    "commands/options.py": (
        r"    sampling = parser.add_argument_group\((?:\n|.)*?\n    \)\n",
        '    sampling.add_argument("--top-n-sigma", type=number_in(0), help="choose among the highest logits")\n',
    ),
    "serving/apis/chat/protocol.py": (r"    min_p: float \| None = None\n", "    top_n_sigma: float | None = None\n"),
}
REFUSAL = "serving/apis/unsupported.py", r'    "top_n_sigma": .*\n'
CPU_OPTION = {
    "devices/cpu/options.py": (
        r"    \*ARITHMETIC,\n",
        '    Option("attention_scale", "for the cpu backend: multiplies scores", default=1.0, between=(0, 2)),\n',
    ),
    "devices/cpu/runtime.py": (
        r"        adapters: Mapping\[str, Adapter\] = \{\},\n(?=    \):)",
        "        attention_scale: float = 1.0,\n",
    ),
}
IN_THE_RUNTIME = (
    r"        survive_forks\(\)\n",
    "        for module in model.modules():\n"
    "            if type(module).__name__ == 'Attention':\n"
    "                module.scale *= attention_scale\n",
)


# Uses both options in one process and prints the answers as a JSON object.
PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout

from granite4_neuron.commands import cli
from granite4_neuron import UserError, load
from granite4_neuron.generation.defaults import _USED
from granite4_neuron.serving.errors import RequestError
from granite4_neuron.serving.apis.chat.protocol import ChatBody, parse

def said_by(*arguments, typed=""):
    sys.stdin = io.StringIO(typed)
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        try:
            cli.main([*map(str, arguments)])
        except SystemExit:  # after --help
            pass
    return said.getvalue()

def refusal_of(**options):
    try:
        load(cpu_kernels="torch", **options)
    except UserError as error:
        return str(error)

def body(value):
    written = b'{"messages": [{"role": "user", "content": "a"}], "top_n_sigma": %s}' % value
    try:
        return parse(ChatBody, written, 100).top_n_sigma
    except RequestError as error:
        return str(error)

SCALES = dict(attention_scale=1.0), dict(attention_scale=0.5)
hot = "generate", "--cpu-kernels", "torch", "--max-tokens", 24, "--temperature", 2, "--seed", 1, "The"
answers = {
    "help": said_by("generate", "--help"),
    "text": said_by(*hot),
    "likely text": said_by(*hot, "--top-n-sigma", 1),
    "refused": said_by(*hot, "--top-n-sigma", 0),
    "chat": said_by("chat", "--cpu-kernels", "torch", typed="/set top_n_sigma 0.5\\n/set\\n"),
    "bodies": [body(b"0.25"), body(b"-3")],
    "is of checkpoints": "top_n_sigma" in _USED,
    "fingerprints": [str(load(cpu_kernels="torch", **each)[0].fingerprint) for each in ({}, *SCALES)],
    "wrong values": [refusal_of(attention_scale=value) for value in (3, "0.5", float("nan"))],
    "scaled text": said_by(*hot, "--attention-scale", 0.5),
    "another backend": said_by("generate", "--backend", "xla", "--attention-scale", 0.5, "The"),
}
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Add both options to a copy of the package; return a function that runs Python with it."""
    copy = PackageCopy(tmp_path_factory.mktemp("copy"))
    for file, addition in (*SAMPLING_OPTION.items(), *CPU_OPTION.items(), ("devices/cpu/runtime.py", IN_THE_RUNTIME)):
        copy.add(file, *addition)
    copy.remove(*REFUSAL)
    return copy.run


@pytest.fixture(scope="module")
def answers(run):
    done = run("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
class TestSamplingOption:
    def test_the_command_line_has_it(self, answers):
        assert "--top-n-sigma" in answers["help"] and answers["likely text"] != answers["text"]
        assert "top_n_sigma is 0.0, and must be a number above 0" in answers["refused"]

    def test_a_chat_has_it(self, answers):
        assert "top_n_sigma is 0.5." in answers["chat"]
        assert {"top_n_sigma 0.5", "min_p -"} <= set(answers["chat"].splitlines())

    def test_the_server_has_it(self, answers):
        value, refusal = answers["bodies"]
        assert value == 0.25 and "top_n_sigma is -3.0, and must be a number above 0" in refusal

    def test_checkpoints_may_set_it(self, answers):
        assert answers["is of checkpoints"]


@pytest.mark.slow
class TestCpuOption:
    def test_load_has_it(self, answers):
        rule = "and must be a number from 0 to 2."
        assert answers["wrong values"] == [f"attention_scale is {value}, {rule}" for value in ("3", "'0.5'", "nan")]

    def test_states_of_another_value_are_not_reused(self, answers):
        without, default, other = answers["fingerprints"]
        assert without == default != other

    def test_the_command_line_has_it(self, answers):
        assert "--attention-scale" in answers["help"] and answers["scaled text"] != answers["text"]
        assert "attention_scale is an option of the backend cpu; the backend here is xla." in answers["another backend"]


@pytest.mark.slow
def test_only_the_pages_test_notices_them(run):
    """A test reports that the pages lack the sampling option. The other tests of options pass."""
    tests = [ROOT / "test" / "unit" / name for name in ("test_sampling_options.py", "devices/test_backends.py")]
    done = run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not another_backend and not AnotherOption",
        *map(str, tests),
    )
    failed = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    assert failed == [
        "test_the_page_of_the_api_names_each_field",
        "test_the_page_of_the_engine_names_the_options_that_turn_sampling_on",
    ], done.stdout
