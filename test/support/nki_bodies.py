"""Helpers with which the emulator's tests write kernels."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
from nki import emulation


def tile(*shape, dtype=nl.float32, buffer=nl.sbuf, value=None):
    """Return an on-chip tensor inside a kernel, filled with the value if one is given."""
    tensor = nl.ndarray(shape, dtype=dtype, buffer=buffer)
    if value is not None:
        nisa.memset(dst=tensor, value=value)
    return tensor


def run(body, *arrays, programs=1):
    """Run a function of HBM tensors as a kernel."""
    return nki.simulate(nki.jit(body)[programs])(*arrays)


def out(*shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


def stored(tensor):
    result = out(*tensor.shape, dtype=tensor.dtype)
    nisa.dma_copy(dst=result, src=tensor)
    return result


def loaded(hbm, dtype=None):
    tensor = tile(*hbm.shape, dtype=dtype or hbm.dtype)
    nisa.dma_copy(dst=tensor, src=hbm)
    return tensor


def product(stationary, moving, **more):
    dst = tile(stationary.free_size, moving.free_size, buffer=nl.psum)
    nisa.nc_matmul(dst=dst, stationary=stationary, moving=moving, **more)
    return dst


def on_sbuf(psum):
    copied = tile(*psum.shape)
    nisa.tensor_copy(dst=copied, src=psum)
    return copied


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def refuses(message, body, *arrays):
    with pytest.raises(emulation.NkiError, match=message):
        run(body, *arrays)
