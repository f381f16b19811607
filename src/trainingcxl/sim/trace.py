"""Row traces: a Zipf generator with given reuse, the user's own ids, and their exact statistics."""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainingcxl.sim.errors import parameter_error
from trainingcxl.sim.workload import Locality, Model, Tables

__all__ = ["read_trace", "trace_localities", "zipf_exponent", "zipf_localities", "zipf_rows"]

Ids = NDArray[np.integer]
_HEAD_RANKS = 1 << 20
_EXPONENT_MAX = 3.0
_SCATTER = 2_654_435_761


def zipf_rows(
    rng: np.random.Generator, rows: int, count: int, exponent: float
) -> NDArray[np.int64]:
    """Draw row numbers whose popularity is Zipf, scattered over the table.

    Args:
        rng: Source of randomness.
        rows: Rows of the table.
        count: Number of draws.
        exponent: Popularity of rank k is k ** -exponent; 0 is uniform.

    Returns:
        Rows, int64, shape (count,), each in [0, rows). Equal ranks give equal rows.
    """
    head = min(rows, _HEAD_RANKS)
    mass = np.cumsum(np.arange(1, head + 1, dtype=np.float64) ** -exponent)
    power = 1.0 - exponent

    def integral(low: float, high: float) -> float:
        if abs(power) < 1e-12:
            return float(np.log(high / low))
        return float((high**power - low**power) / power)

    # Ranks beyond the head follow the continuous law; the first million are exact.
    low, high = head + 0.5, rows + 0.5
    tail = integral(low, high) if rows > head else 0.0
    drawn = rng.random(count) * (mass[-1] + tail)
    # Sorted keys walk the table in order, which is several times faster than at random.
    order = np.argsort(drawn)
    ranks = np.empty(count, dtype=np.int64)
    ranks[order] = np.searchsorted(mass, np.minimum(drawn[order], mass[-1]), side="left")
    beyond = drawn > mass[-1]
    if beyond.any():
        excess = drawn[beyond] - mass[-1]
        if abs(power) < 1e-12:
            value = low * np.exp(excess)
        else:
            value = (low**power + excess * power) ** (1.0 / power)
        ranks[beyond] = np.clip(np.rint(value) - 1, head, rows - 1).astype(np.int64)
    ranks = np.minimum(ranks, rows - 1)
    step = _SCATTER
    while np.gcd(step, rows) != 1:
        step += 2
    scattered: NDArray[np.int64] = (ranks * (step % rows)) % rows
    return scattered


def _repeats(rows: Ids, previous: Ids) -> float:
    """Share of `rows` that occur in the sorted distinct rows `previous`."""
    if not previous.size:
        return 0.0
    index = np.minimum(np.searchsorted(previous, rows), previous.size - 1)
    return float(np.mean(previous[index] == rows))


def zipf_exponent(model: Model, reuse: float, *, seed: int = 0) -> float:
    """Find the exponent with which `reuse` of a batch's lookups hit rows of the batch before.

    The exponent is the same for all tables. Raises ParameterError when no exponent up to 3 gives
    so little or so much reuse.
    """
    counts = [group.count for group in model.tables]
    divisor = math.gcd(*counts)
    groups = tuple((g.rows, model.batch * g.lookups, g.count // divisor) for g in model.tables)
    least, most, exponent = _exponent(groups, reuse, seed)
    if exponent is None:
        raise parameter_error(
            f"reuse {reuse:g} cannot be reached by a Zipf trace of model '{model.name}'",
            where="--trace zipf",
            do=f"a share in [{least:.3f}, {most:.3f}], or other rows, lookups or batch",
        )
    return exponent


@cache
def _exponent(
    groups: tuple[tuple[int, int, int], ...], reuse: float, seed: int
) -> tuple[float, float, float | None]:
    """Bisect; return the least and most reuse possible, and the exponent if `reuse` lies between.

    `groups` are (rows, draws, number of tables) of each kind of table.
    """

    def reached(exponent: float) -> float:
        hits = draws = 0.0
        for rows, count, weight in groups:
            rng = np.random.default_rng(seed)
            first = np.unique(zipf_rows(rng, rows, count, exponent))
            second = zipf_rows(rng, rows, count, exponent)
            hits += weight * count * _repeats(second, first)
            draws += weight * count
        return hits / draws

    low, high = 0.0, _EXPONENT_MAX
    least, most = reached(low), reached(high)
    if not least <= reuse <= most:
        return least, most, None
    for _ in range(12):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if reached(middle) < reuse else (low, middle)
    return least, most, 0.5 * (low + high)


def zipf_localities(
    model: Model, *, reuse: float, channels: int, batches: int = 4, seed: int = 0
) -> list[Locality]:
    """Generate a Zipf trace and return its statistics per batch.

    Tables of one shape are alike in law, so one of each is drawn and stands for its group; what
    differs between batches is then a little more than in a trace of all tables.
    """
    exponent = zipf_exponent(model, reuse, seed=seed)

    def batches_of(group: Tables, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        while True:
            yield zipf_rows(rng, group.rows, model.batch * group.lookups, exponent)

    streams = [
        (group, batches_of(group, np.random.default_rng((seed, i))))
        for i, group in enumerate(model.tables)
    ]
    tracker = _Tracker(channels)
    # The first batch has none before it; it only primes the tracker.
    found = [
        tracker.batch([(g.count, g.dim, next(stream)) for g, stream in streams])
        for _ in range(batches + 1)
    ]
    return found[1:]


class _Tracker:
    """Statistics of one batch after another, remembering the distinct rows of the last."""

    def __init__(self, channels: int) -> None:
        self.channels = channels
        self.previous: list[Ids] = []

    def batch(self, tables: Sequence[tuple[int, int, Ids]]) -> Locality:
        """Take (weight, dim, rows) of every table; weight is how many tables it stands for."""
        hits = draws = unique = 0.0
        read, written = np.zeros(self.channels), np.zeros(self.channels)
        current: list[Ids] = []
        offset = 0
        for index, (weight, dim, rows) in enumerate(tables):
            distinct = np.unique(rows)
            before = self.previous[index] if self.previous else distinct[:0]
            hits += weight * rows.size * _repeats(rows, before)
            draws += weight * rows.size
            unique += weight * distinct.size
            # Tables start on different channels, so that their first rows do not collide.
            for load, ids in ((read, rows), (written, distinct)):
                count = np.bincount((ids + offset) % self.channels, minlength=self.channels)
                for copy in range(weight):
                    load += dim * np.roll(count, copy)
            offset += weight
            current.append(distinct)
        self.previous = current
        return Locality(
            reuse=hits / draws,
            unique_share=unique / draws,
            lookup_balance=float(read.max() / read.mean()),
            update_balance=float(written.max() / written.mean()),
        )


def read_trace(path: Path) -> Ids:
    """Map a `.npy` file of row ids, shape (samples, tables) or (samples, tables, lookups).

    Raises:
        ParameterError: The file is missing, not a .npy array, of another dtype or shape.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise parameter_error("no such file", where=str(path), do="give a .npy file") from None
    except (OSError, ValueError, EOFError) as error:
        raise parameter_error(
            f"not a .npy array: {error}",
            where=str(path),
            do="save an integer array with numpy.save",
        ) from error
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.integer):
        raise parameter_error(
            f"dtype is {getattr(array, 'dtype', type(array))}", where=str(path), do="integer ids"
        )
    return array


def trace_localities(
    ids: Ids, model: Model, *, channels: int, batches_max: int = 100, where: str = "trace"
) -> list[Locality]:
    """Return the exact statistics of each batch of a trace, in order.

    Args:
        ids: Row numbers, integer, shape (samples, tables) or (samples, tables, lookups).
        model: Gives batch size, tables, rows and dims; must agree with the trace.
        channels: Row r of table t lies on channel (r + t) mod channels.
        batches_max: Batches to look at.
        where: Name of the trace in messages.

    Raises:
        ParameterError: Shape or ids contradict the model, or there are fewer than two batches.
    """
    shapes = [group for group in model.tables for _ in range(group.count)]
    cube = ids[:, :, None] if ids.ndim == 2 else ids
    wanted = f"(samples, {len(shapes)}, lookups)"
    if cube.ndim != 3 or cube.shape[1] != len(shapes):
        raise parameter_error(
            f"shape is {ids.shape}", where=where, do=f"{wanted} for model '{model.name}'"
        )
    uneven = {s.lookups for s in shapes} != {cube.shape[2]}
    if uneven:
        raise parameter_error(
            f"{cube.shape[2]} lookups a table, model '{model.name}' has "
            f"{sorted({s.lookups for s in shapes})}",
            where=where,
            do="set lookups of the model to those of the trace",
        )
    batches = min(cube.shape[0] // model.batch, batches_max)
    if batches < 2:
        raise parameter_error(
            f"{cube.shape[0]} samples are fewer than two batches of {model.batch}",
            where=where,
            do=f"at least {2 * model.batch} samples, or a smaller batch",
        )
    tracker = _Tracker(channels)
    found = []
    for b in range(batches):
        block = np.asarray(cube[b * model.batch : (b + 1) * model.batch])
        _check_range(block, shapes, where=where, first=b * model.batch)
        found.append(tracker.batch([(1, s.dim, block[:, t].ravel()) for t, s in enumerate(shapes)]))
    return found[1:]


def _check_range(block: Ids, shapes: Sequence[Tables], *, where: str, first: int) -> None:
    rows = np.array([s.rows for s in shapes])[None, :, None]
    bad = (block < 0) | (block >= rows)
    if bad.any():
        sample, table, lookup = (int(x) for x in np.argwhere(bad)[0])
        raise parameter_error(
            f"id {int(block[sample, table, lookup])} of table {table} at sample {first + sample}",
            where=where,
            do=f"allowed: [0, {shapes[table].rows}), the rows of the model's table",
        )
