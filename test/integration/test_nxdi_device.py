"""The runtime of NxD Inference on the graphs that a device gets, found by NxD's own router and run by XLA's CPU
compiler, against transformers' uncut sequences (`test.support.nxdi_device`)."""

import random

import pytest
import torch
from transformers import GenerationConfig

from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row
from test.integration.test_device_graphs import device_code_path  # noqa: F401 (a fixture)
from test.integration.test_model import TOLERANCE, reference_logits
from test.support import nxdi_device
from test.support.checkpoints import Case
from test.support.verification import LONGEST, Round, streams, verified_error

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("device_code_path")]

CASE = Case("one layer of each kind", dict(layer_types=("mamba", "attention")))
TOKENS = 4
OPTIONS = dict(
    ctx_batch_size=1,
    is_continuous_batching=True,
    speculation_length=TOKENS,
    max_context_length=32,
    context_encoding_buckets=[16, 32],
    seq_len=128,
    token_generation_buckets=[64, 128],
)
# Around the convolution's window and the buckets; the last ones take continuations.
PROMPTS = (1, 2, 3, 15, 16, 17, 32, 33, 70, 100)


class Sequences:
    """What each slot of a runtime holds, from 1 on, and how far its logits are from those of whole sequences."""

    def __init__(self, runtime, folder):
        self.runtime, self.slots = runtime, range(1, runtime.own_slots + 1)
        self.tokens = streams(runtime.config.vocab_size, runtime.own_slots)
        self.uncut = reference_logits(folder, torch.tensor(self.tokens))
        self.stream = {slot: slot - 1 for slot in self.slots}
        self.length = dict.fromkeys(self.slots, 0)
        self.error = 0.0

    def row(self, slot, count, others=0):
        """Return the slot's next tokens, and then some that are not the sequence's own."""
        start = self.length[slot]
        own = self.tokens[self.stream[slot]][start : start + count]
        return Row(slot, start, own + [(token + 1) % self.runtime.config.vocab_size for token in own[:1]] * others)

    def compare(self, slot, logits, position):
        """Compare logits after the tokens from `position` on, [n, vocab_size]."""
        expected = self.uncut[self.stream[slot]][position : position + len(logits)]
        assert not logits.isnan().any()
        self.error = max([self.error, *(logits - expected).abs().flatten().tolist()])

    def begin(self, slot, count):
        self.stream[slot], self.length[slot] = slot - 1, 0
        self.step({slot: count})

    def step(self, counts):
        rows = [self.row(slot, count) for slot, count in counts.items()]
        for row, logits in zip(rows, self.runtime.step(None, rows), strict=True):
            self.length[row.slot] += len(row.tokens)
            self.compare(row.slot, logits[None], self.length[row.slot] - 1)

    def verify(self, accepted):
        """Verify `TOKENS` tokens of each slot in `accepted`, and reject all but the first ones."""
        rows = [self.row(slot, max(count, 1), TOKENS - max(count, 1)) for slot, count in accepted.items()]
        verification = self.runtime.verify(None, rows)
        for (slot, count), logits in zip(accepted.items(), verification.logits, strict=True):
            self.compare(slot, logits[:count], self.length[slot])
            self.length[slot] += count
        self.runtime.commit(None, verification, list(accepted.values()))

    def copy(self, source, destination):
        self.runtime.copy(None, source, destination, self.length[source])
        self.stream[destination], self.length[destination] = self.stream[source], self.length[source]


@pytest.fixture(scope="module")
def folder(random_checkpoints):
    return random_checkpoints(CASE)


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.exhaustive), 3, pytest.param(4, marks=pytest.mark.exhaustive)],
)
def device(request, device_code_path, folder):  # noqa: F811
    from granite4_neuron.devices.neuron.nxdi import NeuronRuntime

    device = nxdi_device.device_model(folder, batch_size=request.param, **OPTIONS)
    return NeuronRuntime(device.application, GenerationConfig()), device


def test_steps_in_any_order(device, folder):
    """New prompts in used slots, further tokens, decode of some slots in any order, drafts and copies, over all graphs.

    Before each new prompt recurrent state of its slot is poisoned, and so are all caches behind their sequences' ends.
    """
    runtime, device = device
    sequences, choose = Sequences(runtime, folder), random.Random(0)
    device.launches.clear()
    for slot, count in zip(sequences.slots, (70, 2, 16, 33), strict=False):
        device.poison({each - 1: length for each, length in sequences.length.items() if each != slot})
        sequences.begin(slot, count)
    for _ in range(40):
        running = [slot for slot in sequences.slots if sequences.length[slot] + TOKENS < LONGEST]
        some = choose.sample(running, choose.randint(min(1, len(running)), len(running)))
        kind = choose.choice(["begin", "extend", "decode", "decode", "verify", "copy"]) if some else "begin"
        slot = some[0] if some else sequences.slots[0]
        left = LONGEST - sequences.length[slot]
        if kind == "begin":
            device.poison({each - 1: length for each, length in sequences.length.items() if each != slot})
            sequences.begin(slot, choose.choice(PROMPTS))
        elif kind == "extend":
            sequences.step({slot: choose.randint(2, min(left, 50))})
        elif kind == "decode":
            sequences.step(dict.fromkeys(some, 1))
        elif kind == "verify":
            sequences.verify({slot: choose.randint(0, TOKENS) for slot in some})
        elif len(sequences.slots) > 1:
            sequences.copy(slot, choose.choice([each for each in sequences.slots if each != slot]))
        assert sequences.error <= TOLERANCE, (kind, some)
    assert device.launches == device.graphs, "each graph ran"


@pytest.mark.parametrize("rounds", [[Round((4, 1, 2, 4), (2, 1, 2, 0)), Round((1, 3, 4, 4), (0, 2, 4, 4))]])
def test_verification_of_new_sequences(rounds, device, folder):
    runtime, device = device
    slots = runtime.own_slots
    uncut = reference_logits(folder, torch.tensor(streams(runtime.config.vocab_size, slots)))
    error = verified_error(
        runtime,
        uncut,
        (20, 0, 1, 40)[:slots],
        [Round(each.counts[:slots], each.accepted[:slots]) for each in rounds],
        prepare=lambda state: device.poison({}),
        after_commit=lambda state, lengths: device.poison(dict(enumerate(lengths))),
    )
    assert error <= TOLERANCE


def test_more_sequences_than_slots_are_refused(device):
    runtime, _ = device
    with pytest.raises(UserError, match="is compiled for"):
        runtime.allocate(runtime.own_slots + 1, 128)
