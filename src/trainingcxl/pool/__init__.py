"""The pool: tables and logs of one model on persistent memory (paper: the disaggregated memory
pool).

Open, create, recover, lock, look at. No torch here: `inspect` and `verify` answer in a fraction of
a second.
"""

from trainingcxl.pool.inspection import Damage, inspect, verify
from trainingcxl.pool.pool import Pool, RecoveryReport
from trainingcxl.pool.rewind import RewindPoint
from trainingcxl.pool.snapshot import Snapshot, ask_for_snapshot
from trainingcxl.pool.table import Table, TableSpec

__all__ = [
    "Damage",
    "Pool",
    "RecoveryReport",
    "RewindPoint",
    "Snapshot",
    "Table",
    "TableSpec",
    "ask_for_snapshot",
    "inspect",
    "verify",
]
