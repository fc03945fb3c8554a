"""What stays on a device of how tokens are chosen. The kernels have their own tests."""

import torch

from granite4_neuron.devices.cuda.choices import HAS_ALLOWED, HAS_BIASES, HAS_MASK, IS_CHOSEN, SLOT, ChoiceTables
from granite4_neuron.ops.sampling import Choice, Penalties
from granite4_neuron.runtime.interface import FROM_DEVICE, Row

VOCAB = 20
PENALTIES = Penalties(torch.empty(0, dtype=torch.int64), torch.empty(0), 0.5)


def tables(slots=3):
    return ChoiceTables(slots, VOCAB, torch.device("cpu"))


def row(start, choice, told=None, slot=2, sequence=7):
    """Return a row whose counts are noted in `told`."""

    def counts():
        told.append(start)
        return torch.tensor([3, 5]), torch.tensor([0.0, 2.0])

    return Row(slot, start, [FROM_DEVICE], draw=choice, counts=None if told is None else counts, sequence=sequence)


def test_counts_are_told_when_a_sequence_begins_and_after_tokens_that_the_device_did_not_see():
    known, told, choice = tables(), [], Choice(penalties=PENALTIES)
    for start in (10, 11, 12, 14, 15):
        known.options_of([row(start, choice, told)])
    assert told == [10, 14]
    known.tables.counts.fill_(9)
    known.forget([2])
    known.options_of([row(16, choice, told)])
    known.options_of([row(17, choice, told, sequence=8)])  # another sequence of the same length
    assert told == [10, 14, 16, 17]
    assert known.tables.counts[1].nonzero()[:, 0].tolist() == [3, 5] and known.tables.counts[1, 5] == 3
    assert (known.tables.counts[0] == 9).all()


def test_biases_are_those_of_the_slots_sequence():
    known = tables()
    biases = torch.tensor([4, 6]), torch.tensor([1.5, -2.0])
    for sequence, choice in enumerate([Choice(biases=biases), Choice(), Choice(biases=(biases[0][:1], biases[1][:1]))]):
        options = known.options_of([row(10 + sequence, choice, sequence=sequence)])
        assert bool(options[0, HAS_BIASES]) == (choice.biases is not None)
        tokens = () if choice.biases is None else choice.biases[0].tolist()
        assert known.tables.biases[1].nonzero()[:, 0].tolist() == list(tokens)
        assert not known.tables.biases[0].any()


def test_bits_move_when_they_change():
    known, mask, allowed = (
        tables(),
        torch.tensor([1, 2, 3], dtype=torch.uint8),
        torch.full((3,), 255, dtype=torch.uint8),
    )
    options = known.options_of([row(10, Choice(mask=mask, allowed=allowed))])
    assert options[0, HAS_MASK] and options[0, HAS_ALLOWED]
    assert torch.equal(known.tables.bits[1], torch.stack([mask, allowed])) and not known.tables.bits[0].any()
    known.tables.bits.zero_()
    options = known.options_of([row(11, Choice(mask=mask.clone(), allowed=allowed))])
    assert torch.equal(known.tables.bits[1, 0], mask) and not known.tables.bits[1, 1].any()
    options = known.options_of([row(12, Choice(allowed=allowed))])
    assert not options[0, HAS_MASK] and options[0, HAS_ALLOWED]


def test_rows_are_in_the_order_of_the_step():
    known = tables()
    known.options_of([row(10, Choice(), slot=1)])
    options = known.options_of([row(10, Choice(), slot=3), Row(1, 0, []), row(10, Choice())])
    assert options[:, IS_CHOSEN].tolist() == [1, 0, 1] and options[[0, 2], SLOT].tolist() == [2, 1]
