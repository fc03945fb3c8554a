"""Adapters beside the base model in one batch: the logits are PEFT's, and a sequence's text is one, however served."""

import pytest
import torch
from transformers import GenerationConfig

pytest.importorskip("peft", reason="peft is not installed")

from granite4_neuron.checkpoint.adapters import read_adapter
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.errors import UserError
from granite4_neuron.ops import cpu
from granite4_neuron.runtime.cpu import CPURuntime
from granite4_neuron.runtime.interface import Row
from test.support.adapters import peft_logits, reference, save_adapter
from test.support.checkpoints import CASES
from test.support.verification import poison

pytestmark = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")

NAMED = {case.name: case for case in CASES}
INVOCATION = [7, 11, 13]
ADAPTERS = {
    "all": {},
    "some": dict(r=3, target_modules=["k_proj", "in_proj", "shared_mlp.output_linear"]),
    "activated": dict(alora_invocation_tokens=INVOCATION),
}
TOKENS = torch.randint(14, 160, (4, 60), generator=torch.Generator().manual_seed(0)).tolist()


class Adapted:
    """A checkpoint with adapters of it, and a runtime that cuts prompts every 32 tokens."""

    def __init__(self, checkpoint, folder):
        self.checkpoint = checkpoint
        self.folders = {
            name: save_adapter(checkpoint, folder / name, seed, **changes)
            for seed, (name, changes) in enumerate(ADAPTERS.items())
        }

    def runtime(self, dtype=torch.float32):
        model = load_model(self.checkpoint, dtype)
        adapters = {name: read_adapter(folder, model.config) for name, folder in self.folders.items()}
        runtime = CPURuntime(model, GenerationConfig(top_k=None), adapters=adapters)
        runtime.tokens_per_step = 32
        return runtime

    @torch.inference_mode()
    def expected(self, name, tokens):
        """Return transformers' logits after every token, with PEFT's adapter or without."""
        if name is None:
            return reference(self.checkpoint)(torch.tensor([tokens]), use_cache=False).logits[0]
        return peft_logits(self.checkpoint, self.folders[name], tokens)


@pytest.fixture(scope="module", params=["moe", "projection_bias", "rope"])
def adapted(request, random_checkpoints, tmp_path_factory):
    return Adapted(random_checkpoints(NAMED[request.param]), tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def runtime(request, adapted):
    return adapted.runtime(request.param)


def test_logits_are_those_of_peft(adapted):
    """A row of the base model and one of each adapter run in one step."""
    runtime = adapted.runtime()
    state = runtime.allocate(3, 60)
    poison(state)
    rows = [Row(slot, 0, TOKENS[slot], number) for slot, number in ((1, 0), (2, 1), (3, 2))]
    logits = runtime.step(state, rows, all_logits=True)
    for slot, name in enumerate((None, "all", "some"), start=1):
        torch.testing.assert_close(logits[slot - 1], adapted.expected(name, TOKENS[slot]), atol=1e-4, rtol=0)


@torch.inference_mode()
def alone(runtime, tokens, adapter):
    """Run a prompt alone, and then token by token; return the logits after it and after each further token."""
    state = runtime.allocate(1, 60)
    poison(state)
    logits = [runtime.step(state, [Row(1, 0, tokens[:50], adapter)])]
    return torch.cat(logits + [runtime.step(state, [Row(1, at, [tokens[at]], adapter)]) for at in range(50, 60)])


@pytest.mark.parametrize("cuts", [[50], [13, 1, 20, 16]], ids=str)
def test_beside_others_and_in_any_steps(runtime, cuts):
    """Four rows with the base model and two adapters, one of them twice."""
    adapters = [1, 0, 2, 1]
    expected = torch.stack([alone(runtime, tokens, number) for tokens, number in zip(TOKENS, adapters, strict=True)])
    assert not torch.equal(expected[0], alone(runtime, TOKENS[0], 0))
    state, start = runtime.allocate(4, 60), 0
    poison(state)
    for place, count in enumerate([*cuts, *[1] * 10], start=1 - len(cuts)):
        rows = [
            Row(slot + 1, start, TOKENS[slot][start : start + count], number) for slot, number in enumerate(adapters)
        ]
        logits, start = runtime.step(state, rows), start + count
        if place >= 0:
            assert torch.equal(logits, expected[:, place])


@pytest.mark.parametrize("count", [2, 5, 17])
def test_verified_tokens_are_those_of_decode(runtime, count):
    state, one = (runtime.allocate(2, 60) for _ in range(2))
    for each in (state, one):
        poison(each)
        runtime.step(each, [Row(slot, 0, TOKENS[slot][:40], slot) for slot in (1, 2)])
    rows = [Row(slot, 40, TOKENS[slot][40 : 40 + count], slot) for slot in (1, 2)]
    verification = runtime.verify(state, rows)
    for place in range(count):
        decoded = [Row(slot, 40 + place, [TOKENS[slot][40 + place]], slot) for slot in (1, 2)]
        assert torch.equal(verification.logits[:, place], runtime.step(one, decoded))
    runtime.commit(state, verification, [count, count])
    last = [Row(slot, 40 + count, [TOKENS[slot][40 + count]], slot) for slot in (1, 2)]
    assert torch.equal(runtime.step(state, last), runtime.step(one, last))


@pytest.mark.parametrize("options", [dict(kernels="torch"), dict(prefill_scan="quadratic")], ids=str)
def test_other_kernels_refuse_adapters(adapted, options):
    adapter = read_adapter(adapted.folders["all"], adapted.runtime().config)
    with pytest.raises(UserError, match="convert --adapter FOLDER merges"):
        CPURuntime(load_model(adapted.checkpoint), GenerationConfig(), adapters={"one": adapter}, **options)
