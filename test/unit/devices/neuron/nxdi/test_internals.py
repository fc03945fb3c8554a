"""docs/nxdi-internals.md lists every name that the port uses of NxD Inference, NxD and NKI, and all of them exist."""

import ast
import importlib.util
from pkgutil import resolve_name

import pytest

from test.support import nxdi
from test.support import nxdi_internals as internals
from test.support.nxdi_internals import PORT, SOURCE, differences, flat, lacks, members, page

pytestmark = pytest.mark.versions


@pytest.fixture
def sources():
    nxdi.skip_unless_importable()


def test_imports_are_listed():
    assert differences(internals.imported(), page("Imports")) == []


def test_options_are_listed():
    assert internals.options() == flat(page("Options"))


def test_names_of_nki_are_listed():
    assert differences(internals.nki(), page("NKI")) == []


def test_overrides_are_listed(sources):
    """This also finds a parameter that is renamed in their source or in ours."""
    assert differences(internals.overrides(), page("Overrides")) == []


def test_attributes_are_listed(sources):
    assert internals.attributes() - flat(page("Attributes")) == set()


def test_patches_are_listed(sources):
    from granite4_neuron.devices.neuron.nxdi.sdk_custom_calls import _STAND_INS

    patches = {(module, name) for module, name, _ in _STAND_INS if not module.startswith("granite4_neuron")}
    assert patches == {(module, name) for module, names in page("Patches").items() for name in names}


@pytest.mark.parametrize("section", ["Imports", "Overrides", "Patches"])
def test_listed_names_exist(section, sources):
    for owner, names in page(section).items():
        for name, parameters in names.items():
            assert not lacks(resolve_name(f"{owner}.{name}"), parameters), f"{owner}.{name}"


def test_listed_attributes_exist(sources):
    for owner, names in page("Attributes").items():
        assert set(names) <= members(resolve_name(owner)), owner


def test_listed_options_exist(sources):
    ((owner, names),) = page("Options").items()
    config = resolve_name(owner)(tp_degree=1, batch_size=1, seq_len=64)
    assert [name for name in names if not hasattr(config, name)] == []


def test_listed_names_of_nki_exist():
    if importlib.util.find_spec("nki.emulation") is not None:
        pytest.skip("the Neuron SDK is not installed")  # neither the emulator nor a stand-in has the real list of names
    for module, names in page("NKI").items():
        for name in names:
            resolve_name(f"{module}.{name}")


def test_no_other_module_imports_them():
    """The Neuron SDK's stand-ins import NKI to complete it."""
    for path in sorted(SOURCE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        packages = {name.partition(".")[0] for name in names}
        assert PORT in path.parents or not any(name.startswith("neuronx_distributed") for name in packages), path
        assert SOURCE / "devices" / "neuron" / "nki" in path.parents or "nki" not in packages, path


class TestChangesAreSeen:
    """Each of these changes in a source makes one of the tests above fail."""

    def test_an_import(self, monkeypatch):
        monkeypatch.setattr(internals, "_trees", lambda folder: [ast.parse("from torch_xla.core import xla_env_vars")])
        with pytest.raises(AssertionError):
            test_imports_are_listed()

    def test_an_override(self, sources, monkeypatch):
        from granite4_neuron.devices.neuron.nxdi.state import HybridCacheManager

        monkeypatch.setattr(HybridCacheManager, "get_cache", lambda self, seq_len: None, raising=False)
        with pytest.raises(AssertionError, match="get_cache"):
            test_overrides_are_listed(None)

    def test_a_renamed_parameter(self, sources, monkeypatch):
        from neuronx_distributed_inference.models.model_wrapper import ModelWrapper

        monkeypatch.setattr(ModelWrapper, "_get_seq_bucket", lambda self, buckets, length, strategy: None)
        with pytest.raises(AssertionError, match="_get_seq_bucket"):
            test_overrides_are_listed(None)

    def test_a_method_that_is_gone(self, sources, monkeypatch):
        from neuronx_distributed_inference.models.model_wrapper import ModelWrapper

        monkeypatch.delattr(ModelWrapper, "pad_inputs")
        monkeypatch.setattr(internals, "_on_self", lambda cls, how: set())
        with pytest.raises(AssertionError):
            test_listed_attributes_exist(None)
