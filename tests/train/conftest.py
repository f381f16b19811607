"""Fixtures of the tests that train with the command line."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def restored_torch() -> Iterator[None]:
    """Undo what `prepare_torch` sets for the whole process."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fills
