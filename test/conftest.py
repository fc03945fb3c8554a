import pytest
import torch
import transformers

from granite4_neuron.checkpoint import load_model, save_model
from granite4_neuron.random_weights import random_model
from test.support.checkpoints import CASES

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def random_checkpoints(tmp_path_factory):
    """A function from a case to its checkpoint folder, written once a session."""
    written = {}

    def folder(case, dtype=torch.float32):
        if case.name not in written:
            path = tmp_path_factory.mktemp("checkpoints") / case.name
            save_model(random_model(case.config(), seed=len(case.name), dtype=dtype, max_A=case.max_A), path)
            written[case.name] = path
        return written[case.name]

    return folder


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def case_folder(request, random_checkpoints):
    """The folder of each random checkpoint in turn."""
    return random_checkpoints(request.param)


@pytest.fixture(scope="session")
def case_model(case_folder):
    """Each random checkpoint in turn, loaded in float32."""
    return load_model(case_folder, torch.float32)
