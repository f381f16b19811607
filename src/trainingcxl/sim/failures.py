"""Beyond the paper: what failures cost each system, and how cheap and durable its medium is."""

import math
from dataclasses import dataclass

from trainingcxl.sim.errors import parameter_error
from trainingcxl.sim.hardware import Hardware
from trainingcxl.sim.simulate import Result
from trainingcxl.sim.systems import System, pool_medium
from trainingcxl.sim.workload import Model

__all__ = ["Costs", "Failures", "medium_costs", "recover", "snapshot_goodput"]

_DAY_S = 86_400.0
_YEAR_S = 365.25 * _DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """What failures do to a run.

    Attributes:
        mtbf_s: Mean time between failures of the whole machine.
        recovery_s: From restart to the first new batch, `restart_s` included.
        lost_s: Work done again per failure, on average.
        goodput: Share of time that makes progress which lasts, the log's own cost not counted.
        batches_per_second: Lasting batches per second, failures and log counted.
    """

    mtbf_s: float
    recovery_s: float
    lost_s: float
    goodput: float
    batches_per_second: float


def _share(mtbf_s: float, lost_s: float, recovery_s: float) -> float:
    """Useful share of a cycle of one failure: up for the MTBF, of which `lost_s` is done again."""
    return max(mtbf_s - lost_s, 0.0) / (mtbf_s + recovery_s)


def recover(
    system: System,
    hardware: Hardware,
    model: Model,
    result: Result,
    *,
    mtbf_s: float,
    restart_s: float = 60.0,
) -> Failures:
    """Model recovery and goodput of a system that logs every batch.

    A persistent medium rolls one batch back from its log (undo) or plays one forward (redo) and
    loads the MLP parameters. DRAM and SSD systems read their tables or pages again: DRAM loads the
    whole model from the SSD first. A relaxed dense log lags by half its spread on average; those
    batches are done again (exact resume).

    Raises:
        ParameterError: The mean time between failures is not positive.
    """
    if not (mtbf_s > 0.0 and math.isfinite(mtbf_s)):
        raise parameter_error(f"mtbf is {mtbf_s} s", where="--mtbf-hours", do="a number above 0")
    ssd = hardware.media["ssd"]
    name = pool_medium(system, hardware)
    medium = hardware.media[name]
    seconds = restart_s
    if name in ("dram", "cxl_dram"):
        seconds += model.table_bytes / (ssd.read_gbps * ssd.modules * 1e9)
    else:
        channels = hardware.expander.channels if system.near_memory else medium.modules
        read = model.update_bytes / (medium.read_gbps * channels * 1e9)
        write = model.update_bytes / (medium.write_gbps * channels * 1e9)
        seconds += read + write
    seconds += model.dense_bytes / (min(medium.read_gbps, ssd.read_gbps) * 1e9)
    behind = 1.0 if not system.relaxed_dense_log else 1.0 + system.dense_every / 2.0
    lost = behind * result.seconds_per_batch
    share = _share(mtbf_s, lost, seconds)
    return Failures(
        mtbf_s=mtbf_s,
        recovery_s=seconds,
        lost_s=lost,
        goodput=share,
        batches_per_second=share / result.seconds_per_batch,
    )


def snapshot_goodput(
    hardware: Hardware, model: Model, bare: Result, *, mtbf_s: float, restart_s: float = 60.0
) -> Failures:
    """Model the usual alternative: no log, a full snapshot to the SSD at Daly's best interval.

    Args:
        hardware: Its SSD takes the snapshots.
        model: Tables and MLP are written whole.
        bare: Result of the system without checkpoints.
        mtbf_s: Mean time between failures.
        restart_s: Time to start the processes again.
    """
    ssd = hardware.media["ssd"]
    size = model.table_bytes + model.dense_bytes
    cost = size / (ssd.write_gbps * ssd.modules * 1e9)
    interval = max(math.sqrt(2.0 * cost * mtbf_s) - cost, cost)
    recovery = restart_s + size / (ssd.read_gbps * ssd.modules * 1e9)
    lost = 0.5 * (interval + cost)
    share = _share(mtbf_s, lost, recovery) * interval / (interval + cost)
    return Failures(
        mtbf_s=mtbf_s,
        recovery_s=recovery,
        lost_s=lost,
        goodput=share,
        batches_per_second=share / bare.seconds_per_batch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the medium of a system costs and how long it lasts.

    Attributes:
        capacity_gb: All modules of the pool.
        tables_gb: What the model needs of it.
        price_ratio: Price of the tables' bytes over the same bytes of DRAM.
        written_gb_per_day: Bytes written to the pool medium at this rate of batches.
        lifetime_years: Until the rated writes are used, evenly worn; infinite when not limited.
    """

    medium: str
    capacity_gb: float
    tables_gb: float
    price_ratio: float
    written_gb_per_day: float
    lifetime_years: float


def medium_costs(system: System, hardware: Hardware, model: Model, result: Result) -> Costs:
    """Model price and endurance of the medium that holds the tables."""
    name = pool_medium(system, hardware)
    medium, economics = hardware.media[name], hardware.economics[name]
    written = result.bytes_moved.get(f"{name} write", 0.0) / result.seconds_per_batch
    rated = economics.rated_writes * medium.capacity_bytes
    return Costs(
        medium=name,
        capacity_gb=medium.capacity_bytes / 1e9,
        tables_gb=model.table_bytes / 1e9,
        price_ratio=economics.price_ratio,
        written_gb_per_day=written * _DAY_S / 1e9,
        lifetime_years=rated / written / _YEAR_S if written else math.inf,
    )
