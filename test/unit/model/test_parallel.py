"""Each rank holds the part of a model that its heads need, and the ranks together compute the model's logits."""

import threading
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from granite4_neuron import UserError
from granite4_neuron.checkpoint.loading import set_parameter
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.sharding import rank_slice, rank_slices
from granite4_neuron.config import ATTENTION, MAMBA, GraniteMoeHybridConfig
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.families import model_of
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.parameters import parameter
from granite4_neuron.ops import TORCH
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.sizes import sequence_bytes, token_bytes
from test.support.checkpoints import DENSE, nemotron_config, small_config
from test.support.stepping import random_tokens, run_cuts

pytestmark = pytest.mark.versions

LAYERS = dict(layer_types=(MAMBA, ATTENTION))
BIASES = dict(mamba_proj_bias=True, attention_bias=True)
CASES = {
    "one group, two key heads": (dict(), (2, 4)),
    "two groups, biases": (dict(mamba_n_groups=2, **BIASES), (2, 4)),
    "four groups, biases, rope": (dict(mamba_n_groups=4, position_embedding_type="rope", **BIASES), (2, 4)),
    "one key head, three taps": (dict(num_key_value_heads=1, mamba_d_conv=3), (2, 4)),
    "four key heads, no conv bias": (dict(num_key_value_heads=4, mamba_conv_bias=False), (2, 4)),
    "dense, untied": (dict(tie_word_embeddings=False, **DENSE), (2, 4)),
}
SPLITS = [
    pytest.param(changes, degree, id=f"{name}, {degree} ranks")
    for name, (changes, degrees) in CASES.items()
    for degree in degrees
]
MODELS = [
    *(
        pytest.param(small_config(**LAYERS, **changes), degree, id=f"{name}, {degree} ranks")
        for name, (changes, degrees) in CASES.items()
        for degree in degrees
    ),
    *(
        pytest.param(nemotron_config(**changes), degree, id=f"nemotron{name}, {degree} ranks")
        for name, changes, degrees in (
            ("", {}, (2, 4)),
            (", groups of two ranks", dict(mamba_n_groups=2), (4,)),
            (", latent", dict(moe_latent_size=40), (2, 4)),
        )
        for degree in degrees
    ),
]
CUTS = [20, 1, 5, 1]


def rank_share(rank: int, degree: int, count: int) -> list[int]:
    """Return the rank's part of `count` things that are split evenly."""
    return list(range(rank * count // degree, (rank + 1) * count // degree))


def spans(items: list[int], width: int, first: int = 0) -> list[int]:
    """Return the rows of items that are `width` rows each, one after another from row `first`."""
    return [first + item * width + row for item in items for row in range(width)]


def places(name: str, config: GraniteMoeHybridConfig, rank: int, degree: int) -> tuple[int, list[int]] | None:
    """Return the axis along which a tensor is split and its rows on a rank; None if the rank has all rows.

    A rank has its heads, and the groups or the key heads that these heads use.
    """
    heads = rank_share(rank, degree, config.mamba_n_heads)
    groups = sorted({head * config.mamba_n_groups // config.mamba_n_heads for head in heads})
    width, d_state = config.mamba_d_head, config.mamba_d_state
    inner, states = config.mamba_n_heads * width, config.mamba_n_groups * d_state
    x, B, C = (
        spans(heads, width),
        spans(groups, d_state, first=inner),
        spans(groups, d_state, first=inner + states),
    )
    query_heads = rank_share(rank, degree, config.num_attention_heads)
    key_heads = sorted({head * config.num_key_value_heads // config.num_attention_heads for head in query_heads})
    queries, keys = spans(query_heads, config.head_dim), spans(key_heads, config.head_dim)
    shared, experts = config.shared_intermediate_size, config.intermediate_size
    shared_rows, expert_rows = rank_share(rank, degree, shared), rank_share(rank, degree, experts)
    vocabulary = rank_share(rank, degree, config.vocab_size)
    splits = {
        "mamba.in_proj": (0, [*x, *(inner + row for row in [*x, *B, *C]), *spans(heads, 1, 2 * inner + 2 * states)]),
        "mamba.conv1d": (0, [*x, *B, *C]),
        "mamba.A_log": (0, heads),
        "mamba.D": (0, heads),
        "mamba.dt_bias": (0, heads),
        "mamba.norm": (0, x),
        "mamba.out_proj.weight": (1, x),
        "self_attn.q_proj": (0, queries),
        "self_attn.k_proj": (0, keys),
        "self_attn.v_proj": (0, keys),
        "self_attn.o_proj.weight": (1, queries),
        "shared_mlp.input_linear": (0, [*shared_rows, *(shared + row for row in shared_rows)]),
        "shared_mlp.output_linear": (1, shared_rows),
        "block_sparse_moe.input_linear": (1, [*expert_rows, *(experts + row for row in expert_rows)]),
        "block_sparse_moe.output_linear": (2, expert_rows),
        "embed_tokens": (0, vocabulary),
        "lm_head": (0, vocabulary),
    }
    return next((split for part, split in splits.items() if f".{part}" in f".{name}"), None)


def slices(model: HybridForCausalLM, rank: int, degree: int) -> dict[str, torch.Tensor]:
    return {name: rank_slice(name, weight, model.config, rank, degree) for name, weight in model.named_parameters()}


@pytest.mark.parametrize("changes, degree", SPLITS)
def test_a_rank_has_what_its_heads_need(changes, degree):
    config = small_config(**LAYERS, **changes)
    model = random_model(config)
    with torch.device("meta"):
        part = model_of(config, parallel=Parallel(0, degree))
    shapes = {name: parameter.shape for name, parameter in part.named_parameters()}
    rank_parameters = [slices(model, rank, degree) for rank in range(degree)]
    for rank, found in enumerate(rank_parameters):
        assert found.keys() == shapes.keys()
        for name, weight in model.named_parameters():
            where = places(name, config, rank, degree)
            expected = weight if where is None else weight.index_select(where[0], torch.tensor(where[1]))
            assert torch.equal(found[name], expected), name
            assert found[name].shape == shapes[name], name
            assert parameter(name, config).split_axis == (None if where is None else where[0]), name
    for name, weight in model.named_parameters():
        axis, parts = parameter(name, config).split_axis, [found[name] for found in rank_parameters]
        expected = weight if axis is None else torch.cat(parts, axis)
        assert torch.equal(rank_slices(name, weight, config, degree), expected), name


@pytest.mark.parametrize("changes, degree", SPLITS)
def test_the_state_of_a_rank_is_that_of_its_heads(changes, degree):
    """The state's bytes are counted as they are allocated."""
    config, dtype = small_config(**LAYERS, **changes), torch.bfloat16
    state = HybridState.allocate(config, 1, 7, dtype, "meta", degree)
    _, channels = places("mamba.conv1d", config, 0, degree)
    _, keys = places("self_attn.k_proj", config, 0, degree)
    for kind, layer in zip(config.layer_types, state.layers, strict=True):
        if kind == MAMBA:
            assert layer.conv_state.shape == (2, len(channels), config.mamba_d_conv - 1)
            heads = config.mamba_n_heads // degree
            assert layer.ssm_state.shape == (2, heads, config.mamba_d_head, config.mamba_d_state)
        else:
            assert layer.key.shape == layer.value.shape == (2, len(keys) // config.head_dim, 7, config.head_dim)
    held = sum(tensor[1].nbytes for tensor in state.tensors())
    assert held == sequence_bytes(config, 2, degree) + 7 * token_bytes(config, 2, degree)


@dataclass(frozen=True)
class Together(Parallel):
    """Ranks that are threads of one process."""

    tensors: list = None
    barrier: threading.Barrier = None

    def _of_all(self, tensor):
        self.tensors[self.rank] = tensor.clone()
        self.barrier.wait(60)
        every = list(self.tensors)
        self.barrier.wait(60)
        return every

    def all_reduce(self, partial):
        return sum(self._of_all(partial))

    def all_gather(self, part):
        return torch.cat(self._of_all(part), -1)


@pytest.mark.slow_cases
@pytest.mark.parametrize("config, degree", MODELS)
def test_ranks_together_are_the_model(config, degree):
    model = random_model(config)
    tokens = random_tokens(model.config.vocab_size, 2, sum(CUTS))
    expected = run_cuts(model, tokens, CUTS)
    tensors, barrier, logits = [None] * degree, threading.Barrier(degree), [None] * degree

    def run(rank):
        try:
            with torch.device("meta"):
                # Only the group's presence counts; data is sent through `tensors`.
                part = model_of(model.config, Together(rank, degree, "threads", tensors, barrier))
            for name, weight in slices(model, rank, degree).items():
                set_parameter(part, name, weight)
            part.tie_weights()
            logits[rank] = run_cuts(part.eval(), tokens, CUTS)
        finally:
            if logits[rank] is None:
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank_logits in logits:
        assert (rank_logits - expected).abs().max() <= 1e-5


HEADS = [(heads, keys) for heads in range(1, 13) for keys in range(1, heads + 1) if heads % keys == 0]


@pytest.mark.parametrize("heads, keys", HEADS)
def test_degrees_that_attention_can_be_split_by(heads, keys):
    """All ranks must have equally many query heads, and need equally many key heads for them."""
    changes = dict(layer_types=(ATTENTION,), num_attention_heads=heads, num_key_value_heads=keys, hidden_size=2 * heads)
    config = small_config(vocab_size=27720, shared_intermediate_size=27720, **DENSE, **changes)

    def needed(degree, rank):
        """Return the key heads that the rank's query heads use, by the first query head of each within the rank."""
        mine = rank_share(rank, degree, heads)
        used = [head * keys // heads for head in mine]
        return [used.index(key) for key in sorted(set(used))]

    possible = [
        degree
        for degree in range(1, heads + 1)
        if heads % degree == 0 and all(needed(degree, rank) == needed(degree, 0) for rank in range(degree))
    ]
    for degree in possible:
        rank = config.rank_dimensions(degree)
        assert (rank.attention_heads, rank.key_value_heads) == (heads // degree, len(needed(degree, 0)))
    listed = ", ".join(map(str, possible))
    for degree in {*range(0, heads + 2)} - {*possible}:
        with pytest.raises(UserError, match=rf"tp_degree is {degree}; this model can be split by {listed}\.$"):
            config.rank_dimensions(degree)


@pytest.mark.parametrize("groups, degree", [*product((1, 2, 4, 8), (1, 2, 4, 8)), (4, 6), (6, 4)])
def test_degrees_that_groups_can_be_split_by(groups, degree):
    """Groups are divided evenly over the ranks, with their heads; or ranks over the groups, whose heads they share."""
    sizes = dict(mamba_n_heads=24, mamba_d_head=8, hidden_size=96, vocab_size=240, shared_intermediate_size=240)
    config = small_config(layer_types=(MAMBA,), mamba_n_groups=groups, **sizes, **DENSE)
    if groups % degree == 0 or degree % groups == 0:
        rank = config.rank_dimensions(degree)
        assert rank.mamba_groups == max(1, groups // degree)
        assert rank.mamba_conv_dim == (24 * 8 + 2 * max(degree, groups) * 16) // degree
    else:
        with pytest.raises(UserError, match=f"tp_degree is {degree}; this model can be split by "):
            config.rank_dimensions(degree)


@pytest.mark.parametrize(
    "changes", [dict(vocab_size=165), dict(shared_intermediate_size=81), dict(intermediate_size=47)], ids=str
)
def test_dimensions_that_must_be_split_evenly(changes):
    config = small_config(**changes)
    assert config.rank_dimensions(1)
    with pytest.raises(UserError, match=r"tp_degree is 2; this model can be split by 1\.$"):
        config.rank_dimensions(2)
    if "intermediate_size" in changes:  # a dense model has no experts
        assert small_config(**DENSE, **changes).rank_dimensions(2)


def test_a_ranks_first_row_goes_where_its_weights_go():
    """A graph on a device takes no CPU tensor. A model made on the meta device still has the row's real value."""
    with torch.device("meta"):
        part = model_of(small_config(), Parallel(1, 2))
    first_row = part.model.embed_tokens.first_row
    assert first_row.tolist() == [80] and first_row.dtype == torch.int32
    bound = part.bind(TORCH, torch.device("meta"))
    assert {buffer.device.type for buffer in bound.buffers()} == {"meta"}
    assert part.model.embed_tokens.first_row is first_row
