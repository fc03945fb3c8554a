"""A model of one layer over a long context, and its exact results, computed token by token in float64.

The layer reads one half of the residual stream and writes to the other, which the head reads. So logits depend on the
layer's output only, however small it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.config import ATTENTION, MAMBA, GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.model.causal_lm import HybridForCausalLM

# Mamba-2's initialisation: decay rates, and step sizes, whose logarithms are uniform.
DECAY_RATES = 1.0, 16.0
STEP_SIZES = 1e-3, 0.1
# One in this many heads has a decay so near 1 that the first token still counts at the end.
REMEMBERING = 4
# Standard deviation of scores: a few hundred of 131,072 keys have most of the softmax's weight.
SCORES = 2.5

_PIECE = 1024  # the number of tokens whose inputs are computed together
_QUERIES = 16


@dataclass(frozen=True)
class Expected:
    """The exact values after `length` tokens, in float64.

    state: by the names of `HybridState.slot_views`. Keys and values are the sequence's, [kv_heads, length, head_dim].
    logits: of the last tokens, [window, vocab_size].
    """

    length: int
    state: dict[str, torch.Tensor]
    logits: torch.Tensor


def one_layer(config: GraniteMoeHybridConfig, kind: str, longest: int, seed: int = 0) -> HybridForCausalLM:
    """Return a model of one layer with a config's sizes, without experts, whose random weights are in bfloat16.

    Args:
        config: without rotary positions.
        kind: "mamba" or "attention".
        longest: the context whose first token the slowest heads still remember.

    Raises:
        UserError: the config has rotary positions.
    """
    if config.uses_rope:
        raise UserError("a model with rotary positions has other keys at each position; take one without.")
    config = replace(
        config,
        layer_types=(kind,),
        num_hidden_layers=1,
        num_local_experts=0,
        shared_intermediate_size=32,
        tie_word_embeddings=False,
        max_position_embeddings=longest,
    )
    model = random_model(config, seed, torch.bfloat16)
    [layer] = model.model.layers
    half = config.hidden_size // 2
    with torch.no_grad():
        model.model.embed_tokens.weight[:, half:] = 0
        model.lm_head.weight[:, :half] = 0
        layer.shared_mlp.output_linear.weight.zero_()
        if kind == MAMBA:
            layer.mamba.out_proj.weight[:half] = 0
            _draw_decays(layer.mamba, longest, torch.Generator().manual_seed(seed))
        else:
            layer.self_attn.o_proj.weight[:half] = 0
            # The norm gives values around 1 in one half, and projections keep their size.
            factor = math.sqrt(SCORES / (config.attention_multiplier * math.sqrt(config.head_dim)))
            layer.self_attn.q_proj.weight *= factor
            layer.self_attn.k_proj.weight *= factor
    return model


def _draw_decays(mamba: torch.nn.Module, longest: int, generator: torch.Generator) -> None:
    low, high = STEP_SIZES
    heads = mamba.num_heads
    steps = low * (high / low) ** torch.rand(heads, generator=generator)
    rates = torch.empty(heads).uniform_(*DECAY_RATES, generator=generator)
    rates[-1], steps[-1] = DECAY_RATES[1], STEP_SIZES[1]  # the fastest decay
    rates[::REMEMBERING] = 1 / (longest * steps[::REMEMBERING])
    mamba.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # its softplus is `steps`
    mamba.A_log.copy_(rates.log())


def expected(
    model: HybridForCausalLM, tokens: Sequence[int], lengths: Sequence[int], window: int, device: str = "cpu"
) -> Iterator[Expected]:
    """Yield the exact results after each of some lengths, in float64, from the model's rounded weights.

    Args:
        model: of `one_layer`.
        tokens: as many as the largest length.
        lengths: ascending, each at least `window`.
        window: the number of last tokens whose logits are computed.
        device: to compute on.
    """
    computed = {MAMBA: _mamba, ATTENTION: _attention}[model.config.layer_types[0]]
    weights = {name: weight.to(device, torch.float64) for name, weight in model.named_parameters()}
    ids = torch.tensor(tokens, device=device)
    # Inputs of each token of the vocabulary, because they do not depend on positions.
    stream = weights["model.embed_tokens.weight"] * model.config.embedding_multiplier
    x = _rms_norm(stream, weights["model.layers.0.input_layernorm.weight"], model.config.rms_norm_eps)
    for length, state, mixed in computed(model.config, weights, x, ids, lengths, window):
        hidden = stream[ids[length - window : length]] + model.config.residual_multiplier * mixed
        hidden = _rms_norm(hidden, weights["model.norm.weight"], model.config.rms_norm_eps)
        yield Expected(length, state, hidden @ weights["lm_head.weight"].T / model.config.logits_scaling)


def _mamba(config, weights, x, ids, lengths, window):
    """Yield lengths, states, and the layer's outputs for the last tokens before each, [window, hidden_size]."""
    own = {name.removeprefix("model.layers.0.mamba."): weight for name, weight in weights.items()}
    heads, head_dim, groups, d_state = (
        config.mamba_n_heads,
        config.mamba_d_head,
        config.mamba_n_groups,
        config.mamba_d_state,
    )
    inner, taps = heads * head_dim, config.mamba_d_conv
    bias = own.get("in_proj.bias", 0.0)
    z, xBC, dt = (x @ own["in_proj.weight"].T + bias).split([inner, inner + 2 * groups * d_state, heads], 1)
    dt = torch.nn.functional.softplus(dt + own["dt_bias"]).clamp(*config.time_step_limit)
    log_decay = dt * -torch.exp(own["A_log"])
    inputs = torch.cat([xBC, xBC.new_zeros(1, xBC.shape[1])])  # the last row is the input before the first token
    before = torch.full((taps - 1,), len(xBC), device=ids.device)
    padded = torch.cat([before, ids])
    state = x.new_zeros(heads, head_dim, d_state)
    outputs: list[torch.Tensor] = []
    stops = sorted({*range(0, lengths[-1], _PIECE), *lengths, *(length - window for length in lengths)})
    for start, stop in itertools.pairwise(stops):
        piece = inputs[padded[start : stop + taps - 1]]
        convolved = own.get("conv1d.bias", 0.0) + sum(
            piece[tap : tap + stop - start] * own["conv1d.weight"][:, 0, tap] for tap in range(taps)
        )
        convolved = convolved * torch.sigmoid(convolved)
        values, B, C = convolved.split([inner, groups * d_state, groups * d_state], 1)
        values = values.unflatten(1, (heads, head_dim))
        B, C = (part.unflatten(1, (groups, 1, d_state)) for part in (B, C))
        dt_x = (dt[ids[start:stop]][..., None] * values).unflatten(1, (groups, -1))
        decay = torch.exp(log_decay[ids[start:stop]])[..., None, None]
        is_seen = any(length - window <= start < length for length in lengths)
        outputs = outputs if is_seen else []
        for token in range(stop - start):
            state.mul_(decay[token])
            state.view(groups, -1, head_dim, d_state).addcmul_(dt_x[token][..., None], B[token][:, :, None])
            if is_seen:
                y = (state.view(groups, -1, head_dim, d_state) * C[token][:, :, None]).sum(-1).view(heads, head_dim)
                outputs.append((y + own["D"][:, None] * values[token]).flatten())
        if stop in lengths:
            gate = z[ids[stop - window : stop]]
            gated = torch.stack(outputs[-window:]) * gate * torch.sigmoid(gate)
            gated = _rms_norm(gated.unflatten(1, (groups, -1)), 1.0, config.rms_norm_eps).flatten(1)
            mixed = gated * own["norm.weight"] @ own["out_proj.weight"].T + own.get("out_proj.bias", 0.0)
            conv_state = inputs[padded[stop : stop + taps - 1]].T
            yield stop, {"layers.0.conv_state": conv_state, "layers.0.ssm_state": state.clone()}, mixed


def _attention(config, weights, x, ids, lengths, window):
    """Yield the same as `_mamba`, for an attention layer."""
    own = {name.removeprefix("model.layers.0.self_attn."): weight for name, weight in weights.items()}
    query, key, value = (
        (x @ own[f"{name}_proj.weight"].T + own.get(f"{name}_proj.bias", 0.0)).unflatten(1, (-1, config.head_dim))
        for name in "qkv"
    )
    shared = query.shape[1] // key.shape[1]
    for length in lengths:
        mixed = []
        keys, values = key[ids[:length]], value[ids[:length]]
        for start in range(length - window, length, _QUERIES):
            stop = min(start + _QUERIES, length)
            is_hidden = torch.arange(length, device=ids.device) > torch.arange(start, stop, device=ids.device)[:, None]
            heads = []
            for head in range(query.shape[1]):
                scores = query[ids[start:stop], head] @ keys[:, head // shared].T * config.attention_multiplier
                shares = torch.softmax(scores.masked_fill(is_hidden, -math.inf), 1)
                heads.append(shares @ values[:, head // shared])
            mixed.append(torch.cat(heads, 1))
        state = {"layers.0.key": keys.transpose(0, 1), "layers.0.value": values.transpose(0, 1)}
        yield length, state, torch.cat(mixed) @ own["o_proj.weight"].T + own.get("o_proj.bias", 0.0)


def _rms_norm(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight
