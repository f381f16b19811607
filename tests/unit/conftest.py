"""Pools for the tests of the library layer: small, seeded, closed at the end, and images of what
a kill leaves.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainingcxl.pool import Pool, Table

sys.path.insert(0, str(Path(__file__).parent))  # for the modules that tests share

from pool_bytes import Crashed, train


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> Iterator[None]:
    """The models here are too small for more; two would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class PoolBench:
    """Opens pools in one folder and closes whatever is still open at the end."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.options = options
        self._open: list[Pool] = []
        self._images = 0

    @property
    def path(self) -> Path:
        return self.folder / "test.pool"

    def open(self, path: Path | None = None, **options: Any) -> Pool:
        pool = Pool(path or self.path, **{"threads": 1, **self.options, **options})
        self._open.append(pool)
        return pool

    def image(self, path: Path | None = None) -> Path:
        """Copies the pool's files as they are now: what kill -9 at this instant leaves behind."""
        self._images += 1
        copy = self.folder / f"image{self._images}.pool"
        shutil.copytree(path or self.path, copy)
        return copy

    def close(self) -> None:
        for pool in self._open:
            pool.close()


@pytest.fixture
def bench(tmpfs_folder: Path) -> Iterator[PoolBench]:
    """Pools of level `process` on tmpfs."""
    made = PoolBench(tmpfs_folder)
    yield made
    made.close()


@pytest.fixture(params=["process", "power"])
def any_bench(request: pytest.FixtureRequest, tmpfs_folder: Path) -> Iterator[PoolBench]:
    """Pools of level `process`, then of level `power` by the DAX code path."""
    options = {} if request.param == "process" else {"durability": "power", "_medium": "fsdax"}
    made = PoolBench(tmpfs_folder, **options)
    yield made
    made.close()


@pytest.fixture
def kept_horizon(request: pytest.FixtureRequest) -> None:
    """Left to itself the engine may choose the form of the log that keeps none."""
    for name in ("bench", "any_bench"):
        if name in request.fixturenames:
            request.getfixturevalue(name).options.setdefault("undo_log", "background")


@pytest.fixture
def rows_of() -> Callable[[Pool], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Copies of weights and state of every table."""

    def copies(pool: Pool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        def of(table: Table) -> tuple[np.ndarray, np.ndarray]:
            return table.weight.copy(), table.state.copy()

        return {name: of(table) for name, table in pool.tables.items()}

    return copies


@pytest.fixture(scope="session")
def origin(shm_root):
    """12 batches with a dense generation every 5, then the image of a kill: frames are live,
    nothing is clean.
    """
    torch.manual_seed(0)
    folder = shm_root / "damage"
    folder.mkdir()
    states = {}
    pool = Pool(folder / "good.pool", threads=1)
    train(pool, 12, 5, states=states)
    shutil.copytree(folder / "good.pool", folder / "crashed.pool")
    pool.close()
    yield Crashed(folder / "crashed.pool", states, 12)
    shutil.rmtree(folder)


@pytest.fixture
def crashed(origin, bench):
    """A copy to be damaged."""
    shutil.copytree(origin.path, bench.path)
    return Crashed(bench.path, origin.states, origin.committed)


@pytest.fixture
def closed(bench):
    """A pool that was closed after 6 batches, and its tables."""
    torch.manual_seed(0)
    states = {}
    with bench.open() as pool:
        train(pool, 6, 1, states=states)
    return Crashed(bench.path, states, 6)


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Digests are long and say nothing; the fact that they differ does."""
    if (
        op == "=="
        and isinstance(left, str)
        and isinstance(right, str)
        and len(left) == len(right) == 64
    ):
        return ["the digests differ", f"  {left}", f"  {right}"]
    return None
