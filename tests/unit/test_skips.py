"""A skip that nobody expects fails the run, so that no test is lost without a word."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
TESTS = {
    "passes": "def test_a():\n    pass\n",
    "dax": "import pytest\n\n@pytest.mark.dax\ndef test_a():\n    assert False\n",
    "bare": "import pytest\n\ndef test_a():\n    pytest.skip('no time')\n",
    "module": "import pytest\n\npytest.importorskip('no_such_module')\n",
    "samples": "import pytest\n\n@pytest.mark.samples\ndef test_a():\n    assert False\n",
    "xfail": "import pytest\n\n@pytest.mark.xfail\ndef test_a():\n    assert False\n",
}


def run_pytest(folder: Path, *names: str, has_shared: bool) -> subprocess.CompletedProcess[str]:
    """Runs the named tests in a repository of their own, with or without ../shared beside it."""
    tests = folder / "repository" / "tests"
    tests.mkdir(parents=True)
    shutil.copy(CONFTEST, tests)
    for name in names:
        (tests / f"test_{name}.py").write_text(TESTS[name])
    if has_shared:
        (folder / "shared").mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRAININGCXL_TEST")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "."]
    return subprocess.run(
        command, cwd=tests, env=environment, capture_output=True, text=True, check=False
    )


def test_unexpected_skips_fail_beside_shared(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "passes", "bare", "module", "samples", has_shared=True)
    assert result.returncode == 1, result.stdout
    listed = result.stdout.partition("skipped, unexpectedly")[2]
    assert "test_bare.py::test_a: no time" in listed
    assert "test_module.py: could not import 'no_such_module'" in listed
    assert "test_samples.py::test_a: samples: no data samples" in listed
    assert "1 passed, 3 skipped" in result.stdout.splitlines()[-1]


def test_unexpected_skip_is_only_listed_elsewhere(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "passes", "samples", has_shared=False)
    assert result.returncode == 0, result.stdout
    assert "samples: no data samples" in result.stdout


def test_missing_hardware_and_expected_failures_pass(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "passes", "dax", "xfail", has_shared=True)
    assert result.returncode == 0, result.stdout
    assert "test_dax.py::test_a: dax: TRAININGCXL_TEST_DAX is not set" in result.stdout
    assert "1 passed, 1 skipped, 1 xfailed" in result.stdout.splitlines()[-1]
