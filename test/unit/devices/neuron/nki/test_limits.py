"""Dimensions that the kernels of a Mamba layer refuse, in one sentence."""

import contextlib

import pytest

from granite4_neuron import UserError
from granite4_neuron.config import published_config
from granite4_neuron.devices.neuron.nki.limits import check_convolution, check_mamba_decode, check_scan
from test.support.checkpoints import granite_names

HYBRIDS = [name for name in granite_names() if published_config(name).layer_types.count("mamba")]
SCAN = dict(num_heads=8, head_dim=64, n_groups=2, d_state=128, programs=2)


def ranks(config):
    """Yield the dimensions of a rank, for every degree by which the model can be split."""
    for tp_degree in range(1, config.mamba_n_heads + 1):
        with contextlib.suppress(UserError):
            yield config.rank_dimensions(tp_degree)


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_family_is_taken_at_every_degree(name):
    config = published_config(name)
    for rank in ranks(config):
        heads = (rank.mamba_heads, config.mamba_d_head, rank.mamba_groups, config.mamba_d_state, 2)
        check_scan(*heads)
        check_mamba_decode(1, *heads)
        check_convolution(rank.mamba_conv_dim, config.mamba_d_conv, 8, 2)


@pytest.mark.parametrize("changes", [dict(num_heads=7), dict(head_dim=48), dict(n_groups=3), dict(d_state=256)])
def test_scans(changes):
    check_scan(**SCAN)
    with pytest.raises(UserError, match=r"The NKI kernels for prefill take .* here are"):
        check_scan(**SCAN | changes)


def test_numbers_of_heads():
    with pytest.raises(UserError, match="up to 340 heads; here are d_state 128 and 342 heads"):
        check_scan(**SCAN | dict(num_heads=342))


@pytest.mark.parametrize("changes", [dict(channels=7), dict(d_conv=5), dict(d_conv=1), dict(batch=513)])
def test_convolutions(changes):
    dimensions = dict(channels=8, d_conv=4, batch=1, programs=2)
    check_convolution(**dimensions)
    with pytest.raises(UserError, match="takes a multiple of 2 channels, 2 to 4 taps and up to 512 sequences"):
        check_convolution(**dimensions | changes)
