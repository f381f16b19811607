"""Predict one embedding step of the engine on a calibrated host.

Lookups are independent draws from a Zipf law whose exponent gives the model's share of distinct
rows. Every touch of a row is priced by how far back its last touch lies: over so many bytes of
other rows, on so many pages. How far that is follows from the law and from the order of the passes:

  background log   sort, copy rows (ascending) to the log | lookup (at random) | update (ascending)
  fused log        sort | lookup (at random) | update, with the old bytes copied to the log
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainingcxl.sim.errors import parameter_error
from trainingcxl.sim.host_calibration import HostCalibration
from trainingcxl.sim.host_kernels import SPANS
from trainingcxl.sim.workload import FLOAT_BYTES, Model, Tables

__all__ = ["StepPrediction", "predict_host_step"]

Array = NDArray[np.float64]
One = Array | np.float64
_BINS = 64
_EXPONENT_MAX = 3.0
_RECORD_BYTES = 12  # row number and checksum
_KEY_BYTES = 8
# The batch's numbers after they were first read: written to the copy, checked, and both compared.
_ID_PASSES = 4
# Native calls of a step and the arrays that are handed over.
_CALLS = 10
_HAND_OVERS = {"background": 3, "fused": 1}  # announced; sorted, logged
_SHORT_SORT = 8192
_BATCHES = np.geomspace(1.0, 1e7, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """A model of one embedding step (lookup, reduce, update with undo log) on a host.

    Attributes:
        fixed_s: Numbers copied and checked, gradients checked, threads woken.
        lookup_s: Rows gathered, pooled vectors written.
        sort_s: (row, bag) pairs sorted, distinct rows found.
        reduce_s: Gradients gathered in the order of the rows.
        update_s: Rows read, changed and stored.
        log_s: Old bytes to the log, with all that the log alone needs.
    """

    fixed_s: float
    lookup_s: float
    sort_s: float
    reduce_s: float
    update_s: float
    log_s: float

    @property
    def seconds(self) -> float:
        """CPU seconds of the step, all threads together."""
        return (
            self.fixed_s + self.lookup_s + self.sort_s + self.reduce_s + self.update_s + self.log_s
        )


class _Popularity:
    """Rows of one table in bins of equal popularity.

    Attributes:
        rows: Rows of each bin, shape (bins,).
        rate: Expected lookups of one row of the bin in a batch.
        touched: Probability that a batch touches it.
    """

    def __init__(self, group: Tables, lookups: int, exponent: float, page_bytes: int) -> None:
        self.group = group
        self.lookups = lookups
        self.size = group.dim * FLOAT_BYTES
        self.pages = max(1.0, group.rows * self.size / page_bytes)
        edges = np.unique(np.rint(np.geomspace(1, group.rows + 1, _BINS)))
        power = 1.0 - exponent
        mass = np.log(edges) if abs(power) < 1e-9 else edges**power / power
        self.rows: Array = np.diff(edges)
        self.rate: Array = lookups * np.diff(mass) / (mass[-1] - mass[0]) / self.rows
        self.touched: Array = -np.expm1(-self.rate)

    @cached_property
    def distinct(self) -> float:
        """Distinct rows of a batch."""
        return float(self.rows @ self.touched)

    def distinct_of(self, batches: Array) -> Array:
        """Return the distinct rows of so many batches in a row, shape of `batches`."""
        untouched = np.log1p(-np.minimum(self.touched, 1.0 - 1e-15))
        return -np.expm1(np.multiply.outer(batches, untouched)) @ self.rows

    def pages_of(self, rows: One) -> Array:
        """Return the pages on which so many distinct rows lie."""
        return np.asarray(self.pages * -np.expm1(-rows / self.pages))


def _exponent(model: Model, page_bytes: int) -> float:
    """Return the Zipf exponent that gives the model's share of distinct rows, at least 0."""
    wanted = model.locality.unique_share * model.lookups

    def distinct(exponent: float) -> float:
        tables = _tables(model, exponent, page_bytes)
        return sum(t.distinct * t.group.count for t in tables)

    low, high = 0.0, _EXPONENT_MAX
    if distinct(low) <= wanted:
        return low
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if distinct(middle) > wanted else (low, middle)
    return low


def _tables(model: Model, exponent: float, page_bytes: int) -> list[_Popularity]:
    return [
        _Popularity(group, model.batch * group.lookups, exponent, page_bytes)
        for group in model.tables
    ]


class _Step:
    """One step of a model in the steady state."""

    def __init__(self, model: Model, host: HostCalibration, undo_log: str) -> None:
        self.model, self.host, self.undo_log = model, host, undo_log
        self.is_fused = undo_log == "fused"
        self.tables = _tables(model, _exponent(model, host.page_bytes), host.page_bytes)
        # Distinct bytes and pages of so many batches, over all tables, and what every step touches
        # besides: pooled vectors, their gradients, row numbers and keys.
        pooled_stride = model.pooled_bytes / model.batch
        self.pooled_pages = model.batch * min(1.0, pooled_stride / host.page_bytes)
        self.index_bytes = 6.0 * _KEY_BYTES * model.lookups
        self.other = 2.0 * model.pooled_bytes + self.index_bytes
        self.bytes = np.full(_BATCHES.size, self.other)
        self.pages = np.full(_BATCHES.size, self.other / host.page_bytes)
        for table in self.tables:
            rows = table.distinct_of(_BATCHES)
            self.bytes += table.group.count * table.size * rows
            self.pages += table.group.count * table.pages_of(rows)

    def back(self, batches: Array | float) -> tuple[Array, Array]:
        """Return the bytes and pages touched over so many batches."""
        at = np.log(np.maximum(batches, 1.0))
        known = np.log(_BATCHES)
        return np.interp(at, known, self.bytes), np.interp(at, known, self.pages)

    def random(self, size: int, span: One, pages: One) -> Array:
        """Seconds to read a row at random whose last touch lies `span` bytes and `pages` back."""
        region = np.minimum(np.maximum(pages, 1.0) * self.host.page_bytes, SPANS[-1])
        near, far = (self.host.row_s(family, size, region) for family in ("sparse", "cold"))
        middle = self.host.row_s("dense", size, region)
        # Bytes of rows behind each of the three: one row a page, whole pages, the largest span.
        least = np.log(region / self.host.page_bytes * size)
        whole, most = np.log(region), math.log(SPANS[-1])
        at = np.log(np.maximum(span, 1.0))
        spread = np.clip((at - least) / np.maximum(whole - least, 1e-9), 0.0, 1.0)
        beyond = np.clip((at - whole) / np.maximum(most - whole, 1e-9), 0.0, 1.0)
        return np.asarray(near + spread * (middle - near) + beyond * (far - middle))

    def ascending(self, size: int, span: One, pages: One, a_page: float, *, stores: bool) -> Array:
        """Seconds to read (and store) a row in ascending order, with so many rows on a page."""
        update = "_update" if stores else ""
        few = self.host.row_s(f"few{update}", size, span)
        if a_page >= 1.0:
            many = self.host.row_s(f"many{update}", size, span)
            return few + min(math.log2(a_page) / 2.0, 1.0) * (many - few)
        # From a row every eighth page on, the order is of no use to the page tables.
        alone = self.random(size, span, pages)
        if stores:
            alone = alone + few - self.host.row_s("few", size, span)
        return few + min(-math.log2(a_page) / 3.0, 1.0) * (alone - few)

    def numbers(self, count: float) -> float:
        """Seconds to go through so many 8-byte row numbers, keys or offsets of the step."""
        return self.host.scan_s(_KEY_BYTES * count, self.index_bytes)

    def starts(self, passes: int) -> float:
        """Seconds of the first accesses of passes over a table, which nothing hides."""
        return passes * self.host.latency_ns * 1e-9

    def fixed(self) -> float:
        model, host = self.model, self.host
        given = model.lookups + model.batch * model.num_tables  # ids and offsets
        new = host.scan_s(_KEY_BYTES * given, SPANS[-1])
        grads = host.scan_s(model.pooled_bytes, float(self.back(1.0)[0]))
        hand_overs = _HAND_OVERS[self.undo_log] * host.hand_over_us * 1e-6
        calls = _CALLS * host.call_us * 1e-6
        return new + _ID_PASSES * self.numbers(given) + grads + hand_overs + calls

    def lookup(self, table: _Popularity) -> float:
        """Rows at random: the first touch of a batch, and repeats within the batch."""
        size, model = table.size, self.model
        since = 1.0 / np.maximum(table.touched, 1e-12)
        span, pages = self.back(since if self.is_fused else 2.0)
        # A page is shared: other rows of it may have been looked up before in this pass.
        if table.lookups >= table.pages:
            pages = np.minimum(pages, table.pages_of(np.float64(table.pages)))
        first = table.rows * table.touched * self.random(size, span, pages)
        gap = np.minimum(1.0 / np.maximum(table.rate, 1e-12), 1.0)
        near = -np.expm1(-np.multiply.outer(gap, table.rate)) @ table.rows
        repeats = table.rows * (table.rate - table.touched)
        again = repeats * self.random(size, size * near, table.pages_of(near))
        pooled = model.batch * self.host.pooled_s(size, model.pooled_bytes)
        read = self.numbers(table.lookups + model.batch)
        return float(first.sum() + again.sum() + pooled) + read + self.starts(1)

    def sort(self, table: _Popularity) -> float:
        """A radix sort by digits of 8 bits (11 for short inputs), and the search for rows."""
        host, bits = self.host, math.ceil(math.log2(max(table.group.rows, 2)))
        passes = math.ceil(bits / (11 if table.lookups <= _SHORT_SORT else 8))
        loops = passes * table.lookups * (host.scatter_ns + host.count_ns) * 1e-9
        # Keys are made of ids, read twice for the rows, and rows and their places are written.
        return loops + self.numbers(4.0 * table.lookups + 2.0 * table.distinct)

    def reduce(self, table: _Popularity) -> float:
        """Gradients of the bags in the order of the rows."""
        size, batch = table.size, self.model.batch
        pages = np.float64(self.pooled_pages)
        first = self.random(size, np.float64(self.model.pooled_bytes), pages)
        near = np.float64(size * (batch + table.distinct * batch / table.lookups))
        again = self.random(size, near, pages)
        touched = batch * first + (table.lookups - batch) * again
        return float(touched) + self.numbers(table.lookups + 2.0 * table.distinct) + self.starts(1)

    def update(self, table: _Popularity) -> float:
        a_page = table.distinct / table.pages
        cost = self.ascending(table.size, *self.back(1.0), a_page, stores=True)
        return table.distinct * float(cost) + self.starts(1)

    def log(self, table: _Popularity) -> float:
        """Checksums and records; in the background also the rows once more, and matching."""
        host, size = self.host, table.size
        record = (size + 8) / 8 * host.word_ns * 1e-9
        record += (size / host.log_gbps + _RECORD_BYTES / host.store_gbps) * 1e-9
        total = table.distinct * record + self.numbers(table.distinct)
        if self.is_fused:
            return total
        # Rows of the batch before are handed over by its update, out of the cache.
        own = table.rows * table.touched * (1.0 - table.touched)
        back = self.back(1.0 / np.maximum(table.touched, 1e-12))
        read = self.ascending(size, *back, max(own.sum() / table.pages, 1e-9), stores=False)
        matched = 2.0 * table.distinct * host.merge_ns * 1e-9
        return total + float(own @ read) + matched + self.starts(1)


def predict_host_step(
    model: Model, calibration: HostCalibration, *, undo_log: str = "background"
) -> StepPrediction:
    """Predict one embedding step with SGD and undo log on a calibrated host, in CPU time.

    Args:
        model: Tables, batch, and the share of distinct rows of its locality.
        calibration: Constants of `calibrate_host`, on the medium of the pool.
        undo_log: `background`: rows are copied to the log in a pass of its own; `fused`: by the
            update.

    Raises:
        ParameterError: Another form of the log.
    """
    if undo_log not in _HAND_OVERS:
        raise parameter_error(
            f"undo_log is {undo_log!r}",
            where="predict_host_step",
            do=f"one of {', '.join(_HAND_OVERS)}",
        )
    step = _Step(model, calibration, undo_log)
    parts = {
        name: sum(t.group.count * getattr(step, name)(t) for t in step.tables)
        for name in ("lookup", "sort", "reduce", "update", "log")
    }
    return StepPrediction(
        fixed_s=step.fixed(),
        lookup_s=parts["lookup"],
        sort_s=parts["sort"],
        reduce_s=parts["reduce"],
        update_s=parts["update"],
        log_s=parts["log"],
    )
