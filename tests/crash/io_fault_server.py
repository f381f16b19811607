"""A fork server whose lives train while system calls fail (io_faults.c is loaded before libc).

Each life trains the rows of numpy_trainer.py in a pool; every recovery point is compared with that
trainer, which knows nothing of faults.
"""

import ctypes
import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import numpy_trainer as oracle
from server import fork, join, serve

from trainingcxl.errors import TrainingCXLError
from trainingcxl.pool import Pool, inspect, verify

_JOURNAL_BYTES = 1 << 19  # three cuts of the ring in a training
_ALWAYS = 1 << 40
_PRETEND = -1

Watch = Callable[[Any], None]


# --- faults


class Faults:
    """The rules of io_faults.c in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])

    def add(
        self,
        call: str,
        file: str,
        *,
        first: int = 1,
        last: int = 0,
        error: int = errno.EIO,
        only: int = -1,
        after_slot: bool = False,
    ) -> int:
        """Breaks the first-th to last-th (default: that one) matching call.

        Args:
            call: Its name.
            file: End of the file's path.
            first: Counted from 1.
            last: Of those that break.
            error: errno; 0 with `only`; _PRETEND: nothing is done and success returned.
            only: Bytes that are done.
            after_slot: Counts only where the last write went to a slot of the journal.
        """
        rule = self._library.io_fault(
            call.encode(), file.encode(), ctypes.c_long(first), ctypes.c_long(last or first),
            error, ctypes.c_long(only), ctypes.c_long(4096 if after_slot else -1),
        )  # fmt: skip
        assert rule >= 0
        return int(rule)

    def seen(self, rule: int) -> int:
        return int(self._library.io_fault_seen(rule))

    def clear(self) -> None:
        self._library.io_faults_clear()


# --- a training


class Training:
    """A pool, a run over the oracle's tables, and what was reported along the way."""

    def __init__(self, path: str, level: str, **options: Any) -> None:
        import trainingcxl as tcxl

        self.path = path
        if level == "power":
            options = {"journal_bytes": _JOURNAL_BYTES, **options}
        self.pool = Pool(path, durability=level, _medium="block", threads=1, **options)
        configs = [
            tcxl.EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=oracle.DIM,
                feature_names=[name],
                init_scale=0.5,
            )
            for name, rows in oracle.ROWS.items()
        ]
        self.rows = tcxl.EmbeddingBagCollection(
            self.pool, tables=configs, optimizer=tcxl.optim.Adagrad(oracle.LR, eps=oracle.EPS)
        )
        self.run = tcxl.FaultTolerantRun(
            self.pool, self.rows, dense_every=2, sparse_of=lambda batch: _features(batch)
        )
        self.durable: list[int | None] = []

    @property
    def first_weights(self) -> dict[str, np.ndarray]:
        return {name: table.weight.copy() for name, table in self.pool.tables.items()}

    def train(self, batches: int = oracle.BATCHES, watch: Watch = lambda training: None) -> None:
        """Goes on until that many batches are committed; `watch` looks at each."""
        import torch

        if self.run.committed_batch >= batches:
            return
        for _ in self.run.epochs(1):
            for batch in self.run.batches(oracle.Batches()):
                difference = self.rows(_features(batch)) - torch.from_numpy(batch.target)
                self.run.step(difference.square().sum() * 0.5)
                self.durable.append(self.pool.durable_batch)
                watch(self)
                if self.run.committed_batch == batches < oracle.BATCHES:
                    return

    @property
    def newest_durable(self) -> int:
        return max((n for n in self.durable if n is not None), default=0)


def _features(batch: oracle.Batch) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(ids) for name, ids in batch.ids.items()}


def undisturbed(folder: str) -> tuple[list[dict[str, tuple[bytes, bytes]]], str]:
    """The oracle's rows after each batch, and the digest of a training without a fault."""
    training = Training(f"{folder}/undisturbed.pool", "process")
    trainer = oracle.NumpyTrainer(training.first_weights)
    expected = [trainer.copy_of()]
    for number in range(oracle.BATCHES):
        trainer.step(oracle.make_batch(number))
        expected.append(trainer.copy_of())
    training.train()
    digest = training.pool.digest()
    training.pool.close()
    return expected, digest


def life(body: Callable[..., Any], **arguments: Any) -> Any:
    """Runs `body` in a forked process; its answer, or the text of its error."""
    import json

    import torch

    def run() -> str:
        torch.set_num_threads(1)
        return json.dumps(body(faults=Faults(), **arguments))

    said = join(*fork(run))
    try:
        return json.loads(said)
    except ValueError:
        raise AssertionError(said) from None


@contextmanager
def kept(report: dict[str, Any]) -> Iterator[None]:
    """Keeps an error for the report: all that a trainer would see of it."""
    try:
        yield
    except (TrainingCXLError, OSError) as error:
        report["error"] = str(error)
        report["kind"] = type(error).__name__
        report["errno"] = getattr(error, "errno", None)


def _after_fault(
    report: dict[str, Any], folder: str, path: str, level: str, durable: int, **options: Any
) -> None:
    """Opens the pool again, compares it with the oracle, trains to the end, compares that."""
    expected, digest = undisturbed(folder)
    again = Training(path, level, **options)
    found = again.pool.recovery.committed_batch if again.pool.recovery else 0
    report["found"] = found
    report["keeps_durable"] = found >= durable
    report["same"] = oracle.rows_of(again.pool) == expected[again.pool.committed_batch]
    again.train()
    report["same_end"] = oracle.rows_of(again.pool) == expected[-1]
    report["same_digest"] = again.pool.digest() == digest
    again.pool.close()
    report["damage"] = len(verify(path))
    shutil.rmtree(f"{folder}/undisturbed.pool")


# --- failed syncs


def _fail_sync(
    faults: Faults, folder: str, level: str, rule: dict[str, Any], at: str, reboot: bool
) -> dict[str, Any]:
    path = f"{folder}/broken.pool"
    report: dict[str, Any] = {}
    training = Training(path, level)
    if at == "background":
        training.train(20)
        training.run.sync()
    number = faults.add(**rule)
    with kept(report):
        if at == "background":
            training.train(21)
            while not faults.seen(number):
                time.sleep(0.001)
        else:
            training.train(watch=lambda t: t.run.sync() if at == "sync" else None)
        training.pool.close()
    if "error" not in report:
        return {"calls": faults.seen(number)}
    durable = training.newest_durable
    with suppress(TrainingCXLError):  # else it was the close
        committed = training.pool.committed_batch
        with kept(report.setdefault("next", {})):
            training.run.sync()
        durable = max(durable, training.pool.durable_batch or 0)
        report["commits_after"] = training.pool.committed_batch - committed
        with kept(report.setdefault("close", {})):
            training.pool.close()
    report["calls_after"] = faults.seen(number) - rule.get("first", 1)
    looked_at = inspect(path)
    report["clean"] = looked_at["clean"]
    report["durable"], report["inspected"] = durable, looked_at["durable_batch"]
    faults.clear()
    _after_fault(report, folder, path, level, durable, _assume_reboot=reboot)
    return report


def failed_sync(folder: str, **arguments: Any) -> dict[str, Any]:
    """A sync fails in training; what the trainer is told, and what the pool is afterwards."""
    return life(_fail_sync, folder=folder, **{"at": "train", "reboot": False, **arguments})


def _dirty_bytes(file: str) -> int:
    """Of this process's mapping of it: what the kernel has yet to write."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if "-" in word:
            is_inside = line.endswith(file)
        elif is_inside and word in ("Private_Dirty:", "Shared_Dirty:"):
            total += int(line.split()[1]) << 10
    return total


def _written_again(faults: Faults, folder: str) -> dict[str, int]:
    path = f"{folder}/broken.pool"
    report: dict[str, int] = {}
    for name in ("undisturbed", "broken"):
        training = Training(path, "process")
        training.train(5 if name == "undisturbed" else 10)
        if name == "broken":
            faults.add("fdatasync", "/data")
            with suppress(OSError):
                training.pool.close()
            faults.clear()
        else:
            training.pool.close()
        faults.add("fdatasync", "", last=_ALWAYS, error=_PRETEND)
        with Pool(path, _medium="block", threads=1) as pool:
            report[name] = _dirty_bytes("/broken.pool/data")
            report["notices"] = len(pool.notices)
        faults.clear()
    report["bytes"] = Path(path, "data").stat().st_size
    return report


def written_again(folder: str) -> dict[str, int]:
    """What an opening after a failed sync leaves for the kernel to write, against any other's."""
    return life(_written_again, folder=folder)


# --- creation, growth, snapshots


def _fail_creation(faults: Faults, folder: str, level: str, rule: dict[str, Any]) -> dict[str, Any]:
    path = f"{folder}/new.pool"
    report: dict[str, Any] = {}
    faults.add(**rule)
    with kept(report):
        training = Training(path, level)
        training.pool.close()
    faults.clear()
    report["left"] = sorted(file.name for file in Path(path).glob("*"))
    report["folder"] = Path(path).exists()
    _after_fault(report, folder, path, level, 0)
    return report


def failed_creation(folder: str, **arguments: Any) -> dict[str, Any]:
    """A pool cannot be created; then it can."""
    return life(_fail_creation, folder=folder, **arguments)


def _fail_growth(
    faults: Faults, folder: str, level: str, rule: dict[str, Any], goes_on: bool
) -> dict[str, Any]:
    path = f"{folder}/small.pool"
    report: dict[str, Any] = {}
    training = Training(path, level)
    before = oracle.rows_of(training.pool)
    faults.add(**rule)
    with kept(report):
        training.train()
    faults.clear()
    report["unchanged"] = oracle.rows_of(training.pool) == before
    report["committed"] = training.pool.committed_batch
    if goes_on:
        training.run.skip()
        report["skipped"] = training.pool.committed_batch
        training.pool.close()
        return report
    training.pool.close()
    _after_fault(report, folder, path, level, 0)
    return report


def failed_growth(folder: str, **arguments: Any) -> dict[str, Any]:
    """A file cannot grow in the first step; the trainer goes on, or comes back."""
    return life(_fail_growth, folder=folder, **arguments)


def _fail_snapshot(faults: Faults, folder: str, rule: dict[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    expected, digest = undisturbed(folder)
    training = Training(f"{folder}/small.pool", "process")
    training.train(10)
    faults.add(**rule)
    with kept(report):
        training.pool.snapshot(f"{folder}/copy")
    faults.clear()
    report["left"] = Path(folder, "copy").exists()
    training.train()
    report["same_end"] = oracle.rows_of(training.pool) == expected[-1]
    report["same_digest"] = training.pool.digest() == digest
    training.pool.snapshot(f"{folder}/copy")
    training.pool.close()
    with Pool(f"{folder}/copy", read_only=True) as copy:
        report["same_copy"] = copy.digest() == digest
    return report


def failed_snapshot(folder: str, **arguments: Any) -> dict[str, Any]:
    """A snapshot cannot be completed; the training goes on, and the next one can."""
    return life(_fail_snapshot, folder=folder, **arguments)


# --- calls that were interrupted or did a part


def _continue(
    faults: Faults, folder: str, level: str, rules: list[dict[str, Any]], reboot: bool
) -> dict[str, Any]:
    path = f"{folder}/slow.pool"
    report: dict[str, Any] = {}
    numbers = [faults.add(**rule) for rule in rules]
    training = Training(path, level)
    training.train(30)
    training.run.sync()
    copy = f"{folder}/copy.pool"
    shutil.copytree(path, copy)  # what a kill leaves
    training.pool.close()
    _after_fault(report, folder, copy, level, 30, _assume_reboot=reboot)
    report["seen"] = [faults.seen(number) for number in numbers]
    return report


def continued(folder: str, **arguments: Any) -> dict[str, Any]:
    """Calls are interrupted or cut short all the time, in training and in recovery."""
    return life(_continue, folder=folder, **{"reboot": False, **arguments})


def _fail_recovery(faults: Faults, folder: str, rule: dict[str, Any]) -> dict[str, Any]:
    path = f"{folder}/broken.pool"
    training = Training(path, "power")
    training.train(30)
    training.run.sync()
    copy = f"{folder}/copy.pool"
    shutil.copytree(path, copy)
    training.pool.close()
    report: dict[str, Any] = {}
    faults.add(**rule)
    with kept(report):
        Training(copy, "power", _assume_reboot=True).pool.close()
    faults.clear()
    _after_fault(report, folder, copy, "power", 30, _assume_reboot=True)
    return report


def failed_recovery(folder: str, **arguments: Any) -> dict[str, Any]:
    """Recovery from the journal meets a fault; then it does not."""
    return life(_fail_recovery, folder=folder, **arguments)


# --- bus errors


def bus_error(folder: str, file: str, keep: int, handler: str, read_only: bool) -> dict[str, Any]:
    """Somebody cuts a file of an open pool; how the process that touches it ends."""
    path = f"{folder}/cut.pool"

    def touch() -> str:
        import faulthandler
        import resource

        import torch

        torch.set_num_threads(1)
        os.dup2(os.open(f"{folder}/said", os.O_WRONLY | os.O_CREAT), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        if handler == "faulthandler":
            faulthandler.enable()
        elif handler == "python":
            signal.signal(signal.SIGBUS, lambda *_: None)
        training = Training(path, "process")
        training.train(5)
        if read_only:
            training.pool.close()
            training = Training(path, "process", read_only=True)
        if file == "other":
            _touch_other(folder)
        elif file == "kill":
            os.kill(os.getpid(), signal.SIGBUS)
        os.truncate(f"{path}/{file}", keep)
        if read_only:
            return str(training.pool.tables["a"].weight.sum())
        training.train()
        return "trained"

    pid, reader = fork(touch)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    said = Path(folder, "said")
    return {
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "said": said.read_text() if said.exists() else "",
        "answer": answer,
    }


def _touch_other(folder: str) -> None:
    """A bus error that has nothing to do with pools."""
    other = Path(folder, "other")
    other.write_bytes(bytes(8192))
    array = np.memmap(other, dtype=np.uint8, mode="r")
    os.truncate(other, 0)
    array[5000].copy()


if __name__ == "__main__":
    serve(globals())
