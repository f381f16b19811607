"""What a long training must not let grow: memory, open files, mappings, threads, the pool's files.

The short form of benchmarks/memory.py, which goes on to 5,000 commits.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"


def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memory_benchmark", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", ["process", "power"])
def test_nothing_grows(tmp_path: Path, level: str) -> None:
    memory = _benchmark()
    lines = memory.child(tmp_path / "pool", 300, 240, 12, level=level)
    samples = [line for line in lines if "batch" in line]
    assert len(samples) == 20
    found = memory.growths(samples, 84)
    assert set(found) == {"rss_anon_mib", "fds", "maps", "threads", "pool_bytes"}
    beyond = {name: by for name, by in found.items() if by > memory.GROWTH_MAX.get(name, 0)}
    assert beyond == {}
