"""Reports of log-probabilities on their way to another process."""

import pickle

import torch

from granite4_neuron.engine.logprobs import certain_logprob, reported
from granite4_neuron.ops.sampling import Logprobs


def test_reports_are_pickled_whole_and_small():
    top, values = torch.tensor([100_351, 5]), torch.tensor([-0.1, -0.30000001])
    reports = [reported(5, Logprobs(-0.3, 2, top, values)), certain_logprob(3, 1), certain_logprob(3, 0)]
    copies = pickle.loads(pickle.dumps(reports))
    assert copies == reports
    assert list(copies[0].top) == list(zip(top.tolist(), values.tolist(), strict=True))
    many = [reported(number, Logprobs(-0.3, 2, top + number, values)) for number in range(1000)]
    assert len(pickle.dumps(many)) < 70 * len(many)
