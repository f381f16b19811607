"""Restoring the Python side of a run from a pool's recovery point, and saying what does not fit."""

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainingcxl.errors import ConfigError, RecoveryError
from trainingcxl.pool import Pool
from trainingcxl.state import decode_blob, decode_tree, encode_tree, json_bytes, plain_states

__all__ = [
    "PlainState",
    "Recorded",
    "changed_environment",
    "check_settings",
    "cpu_model",
    "environment",
    "optimizer_state",
    "restore_dense",
    "restore_optimizer_state",
]


@dataclass(slots=True)
class Recorded:
    """What the resume record carries for loaders without a seek."""

    loader_state: Any = None
    epoch_rng: dict[str, Any] | None = None
    target_epochs: int | None = None
    fetch_rng: list[dict[str, Any] | None] = field(default_factory=list)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Recorded":
        """The part of a resume record."""
        return cls(
            record["loader"],
            record["epoch_rng"],
            record["target_epochs"],
            record.get("fetch_rng", []),
        )


class PlainState:
    """States that are JSON data, as the newest record has them; of those with tensors the dense
    generation has them.
    """

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = items
        self._recorded: dict[str, Any] = {}
        self._changed_late: set[str] = set()

    def record(self) -> dict[str, Any]:
        """The states as they are: what is recorded now."""
        self._recorded = plain_states(self._items)
        return self._recorded

    def changed_late(self, committed: int) -> list[str]:
        """A notice for each that changed since the commit, said once."""
        found = [
            name
            for name, now in plain_states(self._items).items()
            if name not in self._changed_late
            and json_bytes(now) != json_bytes(self._recorded.get(name))
        ]
        self._changed_late.update(found)
        return [
            f"state '{name}' changed after the commit of batch {committed}; resume from there "
            "would not know: change it before run.step(), or pass a scheduler that counts batches "
            "as every_batch="
            for name in found
        ]


def optimizer_state(collections: Iterable[Any]) -> dict[str, Any]:
    """Settings of the row optimizers, by the first table of their module."""
    return {
        name: encode_tree(module.optimizer.state_dict()["param_groups"], None)
        for module in collections
        for name in module.table_names[:1]
    }


def environment(lookup: str | None = None) -> dict[str, Any]:
    """What the dense part's bits depend on besides its inputs (protocol section 7), and how a
    run looks rows up.
    """
    return {
        **({} if lookup is None else {"lookup": lookup}),
        "torch": torch.__version__,
        "dense_threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "cpu_model": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


@cache  # every commit records it
def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name, family and model of the CPU as the kernel tells them; libraries choose their code by
    them. A stepping makes no difference.
    """
    try:
        first = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return platform.machine()
    parts = (line.partition(":") for line in first.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in parts}
    name = fields.get("model name") or fields.get("CPU implementer") or platform.machine()
    numbers = [fields.get(key) for key in ("cpu family", "model", "CPU part")]
    return " ".join([name, *(number for number in numbers if number)])


def changed_environment(pool: Pool, recorded: Mapping[str, Any], *, is_error: bool) -> list[str]:
    """One line for each part of the environment that the pool was trained with and that differs.

    Raises:
        RecoveryError: One does, and that is an error.
    """
    notices = [
        f"{name} is {here}, the pool was trained with {recorded[name]}: the last bits may differ"
        for name, here in environment(pool.lookup).items()
        if name in recorded and here != recorded[name]
    ]
    if notices and is_error:
        raise RecoveryError(notices[0] + "\n  do:    use the recorded one, or strict=False")
    return notices


def check_settings(path: Path, mine: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """Refuses settings that are not those of the pool.

    Raises:
        ConfigError: Names each that differs, with both values.
    """
    differences = [
        f"  {name}: the pool has {recorded.get(name)!r}, this run has {mine.get(name)!r}"
        for name in sorted({*mine, *recorded})
        if mine.get(name) != recorded.get(name)
    ]
    if differences:
        raise ConfigError(
            "\n".join([f"pool '{path}' was trained with other settings", *differences])
        )


def restore_dense(
    pool: Pool,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    record: Mapping[str, Any],
) -> list[str]:
    """Loads model, dense optimizer and further states; returns notices.

    Raises:
        RecoveryError: An entry is missing or unused; names all of them.
    """
    blob = pool.core.dense_blob()
    assert blob is not None, "a pool with a recovery point has a dense generation"
    tree = decode_blob(blob)
    _check_entries(
        pool, "parameters and buffers of the model", set(model.state_dict()), set(tree["model"])
    )
    recorded = set(tree["state"])
    _check_entries(
        pool, "state objects", set(state), recorded & set(state) if pool.is_read_only else recorded
    )
    is_evaluation = pool.is_read_only and optimizer is None
    if not is_evaluation and (optimizer is not None) != ("optimizer" in tree):
        raise RecoveryError(
            f"pool '{pool.path}' was trained {'with' if 'optimizer' in tree else 'without'} a "
            "dense optimizer, "
            f"this run has {'one' if optimizer is not None else 'none'}\n"
            "  do:    pass the same kind of optimizer; to evaluate, open the pool with "
            "read_only=True"
        )
    try:
        model.load_state_dict(tree["model"], strict=True)
    except RuntimeError as error:
        raise RecoveryError(
            f"the dense part of pool '{pool.path}' does not fit the model: {error}"
        ) from error
    notices = []
    if optimizer is not None:
        before = [dict(group) for group in optimizer.param_groups]
        try:
            optimizer.load_state_dict(tree["optimizer"])
        except ValueError as error:
            raise RecoveryError(
                f"the dense optimizer of pool '{pool.path}' does not fit: {error}"
            ) from error
        _mark_stepped(optimizer)
        notices = _changed_groups("the dense optimizer", before, optimizer.param_groups)
    for name, item in state.items():
        # The record is newer than the generation when resume is "latest".
        plain = record.get("state", {})
        item.load_state_dict(decode_tree(plain[name], []) if name in plain else tree["state"][name])
    return notices


def restore_optimizer_state(collections: Iterable[Any], rows: Mapping[str, Any]) -> list[str]:
    """Puts the row optimizers' recorded settings in force; reports where the script's own
    differ.
    """
    notices = []
    for module in collections:
        name = module.table_names[0]
        if name not in rows:
            continue
        groups = decode_tree(rows[name], [])
        before = [dict(group) for group in module.optimizer.param_groups]
        for group, recorded in zip(module.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in recorded.items() if key != "params"})
        _mark_stepped(module.optimizer)
        notices += _changed_groups(
            f"the row optimizer of '{name}'", before, module.optimizer.param_groups
        )
    return notices


def _mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Schedulers warn when they step before their optimizer; this one has stepped in another
    process.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def _changed_groups(
    what: str, before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> list[str]:
    notices = []
    for i, (old, new) in enumerate(zip(before, after, strict=False)):
        for key in new:
            if key == "params" or isinstance(new[key], torch.Tensor) or old.get(key) == new[key]:
                continue
            notices.append(
                f"{key} of {what} (group {i}) is {new[key]} as recorded; the script has "
                f"{old.get(key)}"
            )
    return notices


def _check_entries(pool: Pool, what: str, mine: set[str], recorded: set[str]) -> None:
    if mine == recorded:
        return
    raise RecoveryError(
        f"the {what} differ from those of pool '{pool.path}'\n"
        f"  only in this run:  {sorted(mine - recorded)}\n"
        f"  only in the pool:  {sorted(recorded - mine)}\n"
        "  do:    build the same model, or use another pool"
    )
