"""The table of parameters, compared with the modules that have them."""

import pytest
import torch

from granite4_neuron.errors import UserError
from granite4_neuron.model.families import model_of
from granite4_neuron.model.linear import Matrix
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.parameters import EMBEDDING, HEAD, matmul_weights, parameters
from test.support.checkpoints import CASES, NEMOTRON_CASES, NemotronCase, small_config

pytestmark = pytest.mark.versions

WITH_MTP = NemotronCase("nemotron_mtp", dict(mtp_layer_types=("attention", "mlp", "moe"), moe_latent_size=40))


def module_parameters(config, degree):
    """Return each parameter's shape; whether it is a matrix, may be quantized, and stays in float32."""
    with torch.device("meta"):
        model = model_of(config, Parallel(0, degree))
    found = {}
    for name, tensor in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        is_matrix = isinstance(module, Matrix) and name.endswith(".weight")
        may_be_quantized = is_matrix and module.may_be_quantized
        found[name] = (tuple(tensor.shape), is_matrix, may_be_quantized, name in model.float32_weights())
    return found


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("case", (*CASES, *NEMOTRON_CASES, WITH_MTP), ids=lambda case: case.name)
def test_the_table_equals_the_modules(case, degree):
    """The table gives the modules' names and a rank's shapes."""
    table = parameters(case.config(), degree)
    in_table = {
        name: (one.shape, one.is_matrix, one.may_be_quantized, one.keeps_float32) for name, one in table.items()
    }
    assert in_table == module_parameters(case.config(), degree)


@pytest.mark.parametrize("is_tied", [True, False])
def test_matrices_that_multiply_hidden_states(is_tied):
    """The head counts even if it is tied to the embedding. Experts' matrices are marked as such."""
    config = small_config(tie_word_embeddings=is_tied)
    matrices = matmul_weights(config)
    assert EMBEDDING not in matrices and matrices[HEAD].shape == (config.vocab_size, config.hidden_size)
    assert not any("norm" in name or "conv1d" in name for name in matrices)
    experts = {name for name, one in matrices.items() if one.is_of_experts}
    assert experts == {name for name in matrices if ".block_sparse_moe." in name and ".router." not in name}
    assert len(experts) == 2 * config.num_hidden_layers


def test_a_degree_that_does_not_divide_the_model():
    with pytest.raises(UserError, match="tp_degree is 3; this model can be split by 1, 2, 4"):
        parameters(small_config(), 3)
