"""The fork server: tests never fork themselves, their process has threads and pools."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def ask() -> Iterator[Ask]:
    """Runs a function of server.py in a process that has only imported torch."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
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
