import pytest

from test.support.engines import ChunkRuntime, engine_model


@pytest.fixture(scope="session")
def model():
    """Return the engine's small model, for modules that have no `model` of their own."""
    return engine_model()


@pytest.fixture
def runtime(model):
    """Return a runtime of the module's model, which keeps the steps of one test."""
    return ChunkRuntime(model)
