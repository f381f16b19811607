"""The fork servers: tests never fork themselves, their process has threads and pools."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the rigs import one another by name
Ask = Callable[..., Any]


@contextmanager
def _server(script: str, environment: Mapping[str, str]) -> Iterator[Ask]:
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(script))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def call(name: str, **arguments: Any) -> Any:
        print(json.dumps([name, arguments]), file=server.stdin, flush=True)
        line = server.stdout.readline()
        assert line, f"the fork server died with {server.wait()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    yield call
    server.stdin.close()
    server.wait(timeout=30)
    server.stdout.close()


@pytest.fixture(scope="session")
def ask() -> Iterator[Ask]:
    """Runs a function of server.py in a process that has only imported torch."""
    with _server("server.py", {}) as call:
        yield call


@pytest.fixture(scope="session")
def ask_faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """The same of io_fault_server.py, where system calls fail when told to."""
    library = tmp_path_factory.mktemp("io_faults") / "io_faults.so"
    source = Path(__file__).with_name("io_faults.c")
    compiler = os.environ.get("CC", "cc")
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True
    )
    with _server("io_fault_server.py", {"LD_PRELOAD": str(library)}) as call:
        yield call
