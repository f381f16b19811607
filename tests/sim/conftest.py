"""Fixtures of the simulator's tests: the default machine, the paper's models, one evaluation."""

import pytest

from trainingcxl.sim import Hardware, Model, load_hardware, model_set
from trainingcxl.sim.reproduce import Evaluation, evaluate


@pytest.fixture(scope="session")
def hardware() -> Hardware:
    return load_hardware()


@pytest.fixture(scope="session")
def models() -> list[Model]:
    return model_set("paper")


@pytest.fixture(scope="session")
def evaluation() -> Evaluation:
    return evaluate()
