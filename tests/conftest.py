"""Fixtures and rules of all tests: media, data samples, markers, an account of every skip."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
SHM = Path("/dev/shm")

# A skip is expected only where the machine lacks the hardware these markers name.
MAY_SKIP = frozenset({"vm", "cuda", "dax"})

# What `train` sets for its own process. Set before the first product of this one, so that a test
# and the trainers that it starts compute the same bits, whatever ran before.
os.environ["MKL_CBWR"] = "AUTO,STRICT"

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile(
    "ci", deadline=None, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def data_folder() -> Path | None:
    """Folder of the data samples: TRAININGCXL_TEST_DATA, else ../shared/data; None when absent."""
    named = os.environ.get("TRAININGCXL_TEST_DATA")
    folder = Path(named) if named else SHARED / "data"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def samples() -> Path:
    """Folder of the data samples. A test that uses it is marked `samples`."""
    folder = data_folder()
    if folder is None:
        pytest.skip("no data samples: set TRAININGCXL_TEST_DATA")
    return folder


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@pytest.fixture(scope="session")
def shm_root() -> Iterator[Path]:
    """This session's folder on tmpfs; folders of sessions that were killed are removed first."""
    if not os.access(SHM, os.W_OK) or not os.path.ismount(SHM):
        pytest.skip(f"{SHM} is not a tmpfs one can write to")
    prefix = "trainingcxl-tests-"
    for left_over in SHM.glob(f"{prefix}*"):
        pid = left_over.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not _is_running(int(pid)):
            shutil.rmtree(left_over, ignore_errors=True)
    root = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=SHM))
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def tmpfs_folder(shm_root: Path) -> Iterator[Path]:
    """An empty folder on tmpfs."""
    folder = Path(tempfile.mkdtemp(dir=shm_root))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["tmpfs", "file", pytest.param("dax", marks=pytest.mark.dax)])
def medium_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty folder on each medium that can be made here: tmpfs, an ordinary file system, DAX."""
    if request.param == "tmpfs":
        yield request.getfixturevalue("tmpfs_folder")
    elif request.param == "file":
        yield tmp_path
    else:
        folder = Path(tempfile.mkdtemp(dir=os.environ["TRAININGCXL_TEST_DAX"]))
        yield folder
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pool_path(medium_folder: Path) -> Path:
    """Path of a pool that does not exist yet, on each medium."""
    return medium_folder / "test.pool"


def _missing_hardware(marker: str) -> str | None:
    """Why tests with this marker cannot run here; None when they can."""
    if marker == "cuda":
        import torch

        return None if torch.cuda.is_available() else "no CUDA device"
    if marker in {"vm", "dax"}:
        variable = f"TRAININGCXL_TEST_{marker.upper()}"
        return None if os.environ.get(variable) else f"{variable} is not set"
    if marker == "samples":
        return None if data_folder() else "no data samples: set TRAININGCXL_TEST_DATA"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose markers name something this machine lacks."""
    for marker in ("vm", "cuda", "dax", "samples"):
        if item.get_closest_marker(marker) and (reason := _missing_hardware(marker)):
            pytest.skip(f"{marker}: {reason}")


class _Skips:
    """Collects skips with their reasons; unexpected ones fail the run where the samples lie."""

    def __init__(self) -> None:
        self.expected: list[str] = []
        self.unexpected: list[str] = []

    def add(self, report: pytest.TestReport | pytest.CollectReport, markers: set[str]) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        kind = self.expected if markers & MAY_SKIP else self.unexpected
        kind.append(f"{report.nodeid}: {str(reason).removeprefix('Skipped: ')}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item):
        report = yield
        if report.skipped and not hasattr(report, "wasxfail"):
            self.add(report, {marker.name for marker in item.iter_markers()})
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.add(report, set())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and SHARED.is_dir() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for title, skips in (
            ("skipped, as the machine lacks the hardware", self.expected),
            ("skipped, unexpectedly (fails where ../shared exists)", self.unexpected),
        ):
            if skips:
                terminalreporter.section(title)
                terminalreporter.write_line("\n".join(sorted(skips)))


def pytest_configure(config: pytest.Config) -> None:
    """Count skips in every run."""
    config.pluginmanager.register(_Skips(), "skips")
