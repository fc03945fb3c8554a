"""The time steps of the recurrence: dt after softplus and limits, as `Mamba2.recurrence_inputs` computes them."""

from granite4_neuron.devices.cuda.triton_utils import tl, triton


@triton.jit
def time_step(dt, lowest_dt, highest_dt):
    """Return dt after softplus and clamping."""
    # log(1 + exp(dt)), without losing the digits of exp(dt) in the sum with 1.
    e = tl.exp(tl.minimum(dt, 20.0))
    one_plus_e = 1.0 + e
    softplus = tl.where(
        one_plus_e == 1.0, e, tl.log(one_plus_e) * e / tl.where(one_plus_e == 1.0, 1.0, one_plus_e - 1.0)
    )
    dt = tl.where(dt <= 20.0, softplus, dt)
    return tl.minimum(tl.maximum(dt, lowest_dt, tl.PropagateNan.ALL), highest_dt, tl.PropagateNan.ALL)
