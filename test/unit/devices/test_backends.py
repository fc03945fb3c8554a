"""Declarations of backends: `load` and the command line offer their options, and every other backend refuses them."""

import argparse
import inspect
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from granite4_neuron import UserError, load
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.commands import cli
from granite4_neuron.commands.options import add_declared, command_line
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.devices.backends import BACKENDS, all_options, check_backend
from granite4_neuron.devices.cpu import backend as cpu
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.options import ARITHMETIC
from granite4_neuron.devices.torch.options import GRAPHS
from granite4_neuron.runtime.declaration import Backend, Option

OF_NO_BACKEND = {"model", "revision", "backend", "progress", "remark", "others"}
NEEDED = {"nxdi": {"compiled": "folder"}}


def another_value(option):
    """Return a value of an option that is not its default."""
    if option.choices is not None:
        return next(choice for choice in reversed(option.choices) if choice != option.default)
    if option.is_flag:
        return False
    if option.is_list:
        return [option.least + 1]
    if option.between is not None:
        return sum(option.between) / 3
    return "folder" if option.least is None else option.default + 1


VALUES = {name: another_value(option) for name, option in all_options().items()} | {"adapters": {"one": "folder"}}


def test_the_parameters_of_load_are_options_with_their_defaults():
    """`load` takes the remaining options as its `others`."""
    parameters = inspect.signature(load).parameters
    named = {name: one.default for name, one in parameters.items() if name not in OF_NO_BACKEND}
    assert named.items() <= {name: option.default for name, option in all_options().items()}.items()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", VALUES)
def test_an_option_is_taken_or_refused(backend, option):
    given = NEEDED.get(backend, {}) | {option: VALUES[option]}
    check_backend(backend, NEEDED.get(backend, {}))
    if option in {each.name for each in BACKENDS[backend].options}:
        check_backend(backend, given)
        return
    with pytest.raises(UserError, match=r"backends? (cpu|torch|nxdi)|were chosen when they were compiled"):
        check_backend(backend, given)


def test_a_default_that_every_backend_has_is_not_refused():
    check_backend("torch", {"state_dtype": "float32"})
    check_backend("xla", {"state_dtype": torch.float32})
    with pytest.raises(UserError, match="were chosen when they were compiled"):
        check_backend("nxdi", {"compiled": "folder", "state_dtype": "float32"})


def test_declarations_import_no_framework():
    program = (
        "import sys, granite4_neuron.devices.backends; print({'torch', 'torch_xla', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.fixture
def given(monkeypatch):
    """Declare one more option of the cpu backend, whose class notes the values that it gets; return these values."""
    values = []

    class Runtime(CPURuntime):
        def __init__(self, *arguments, spare_cores, **options):
            values.append(spare_cores)
            super().__init__(*arguments, **options)

    option = Option("spare_cores", "for the cpu backend: cores that compute nothing", default=0, least=0, metavar="N")
    monkeypatch.setitem(BACKENDS, "cpu", replace(cpu.BACKEND, options=(*cpu.OPTIONS, option)))
    monkeypatch.setattr("granite4_neuron.devices.cpu.runtime.CPURuntime", Runtime)
    return values


class TestAnotherOption:
    """A new option needs a declaration and a class that takes it. No other code names it."""

    def test_load_takes_it(self, given):
        load()
        load(spare_cores=2)
        assert given == [0, 2]

    def test_the_command_line_takes_it(self, given, capsys):
        assert cli.main(["generate", "--spare-cores", "3", "--max-tokens", "1", "An"]) == 0
        assert given == [3] and capsys.readouterr().out

    def test_a_wrong_value_is_refused(self, given, capsys):
        assert cli.main(["generate", "--spare-cores", "x", "An"]) == 2
        assert "x is not a whole number of at least 0" in capsys.readouterr().err

    def test_another_backend_refuses_it(self, given):
        with pytest.raises(UserError, match="spare_cores is an option of the backend cpu; the backend here is torch"):
            load(backend="torch", spare_cores=2)


def test_a_generated_command_line_gives_its_values_back():
    for backend in BACKENDS.values():
        options = [each for each in backend.options if not each.is_dtype and each.name not in ("adapters", "mtp")]
        parser = argparse.ArgumentParser()
        add_declared(parser, options)
        for values in (
            {each.name: each.default for each in options},
            {each.name: VALUES[each.name] for each in options},
        ):
            assert vars(parser.parse_args(command_line(options, values))) == values


def test_another_backend_is_on_the_command_line(monkeypatch, capsys):
    """With a declaration in the registry and a runtime, the command line offers it, with its own options only."""

    def load_eagerly(checkpoint, generation_config, *, dtype, progress, remark, **options):
        return CPURuntime(load_model(checkpoint, dtype), generation_config, cpu_kernels="torch", **options)

    state_dtype = replace(all_options()["state_dtype"], choices=("float32", "bfloat16"))
    monkeypatch.setitem(BACKENDS, "eager", Backend("eager", (*ARITHMETIC, state_dtype), load_eagerly))
    command = ["generate", "--backend", "eager", "--max-tokens", "4", "An assignment statement"]
    assert cli.main(command) == 0
    eager = capsys.readouterr().out
    assert cli.main([each if each != "eager" else "cpu" for each in command]) == 0
    assert capsys.readouterr().out == eager
    assert cli.main([*command, "--quantize", "int8"]) == 2
    assert "some for a GPU; eager runs the original" in capsys.readouterr().err
    with pytest.raises(UserError, match="state_dtype is 'float16'; it must be one of float32, bfloat16"):
        load(backend="eager", state_dtype=torch.float16)


def test_an_option_that_no_backend_has():
    with pytest.raises(TypeError, match="unexpected keyword argument 'quantise'; did you mean quantize"):
        load(quantise="int8")


def test_a_value_that_does_not_exist():
    with pytest.raises(UserError, match="quantize is 'int5'; it must be one of " + ", ".join(QUANTIZATIONS)):
        load(quantize="int5")
    with pytest.raises(UserError, match="backend is 'gpu'; it must be one of " + ", ".join(BACKENDS)):
        load(backend="gpu")
    with pytest.raises(UserError, match="device is 3, and must be a string"):
        load(backend="torch", device=3)
    with pytest.raises(UserError, match="prefill_by_view is 'no', and must be True, False or None"):
        load(backend="torch", prefill_by_view="no")
    with pytest.raises(UserError, match="graphs is 'all'; it must be one of " + ", ".join(GRAPHS)):
        load(backend="torch", graphs="all")
    with pytest.raises(UserError, match=r"dtype is 'torch.float32'; it must be one of float32, bfloat16, float16"):
        load(dtype="torch.float32")
    with pytest.raises(UserError, match=r"state_dtype is 'torch.float16'; it must be one of float32"):
        load(state_dtype="torch.float16")
