import pytest

from tests.unit.megatron_patches.fresh import FreshProcesses


@pytest.fixture(scope="package")
def fresh():
    processes = FreshProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="package")
def megatron_imported():
    """Once, here, so that no forked rank has to."""
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
