"""Energy of one batch by component: watts times busy and idle time, plus bytes times pJ per bit."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainingcxl.sim.hardware import Hardware
from trainingcxl.sim.systems import System, pool_medium

__all__ = ["Activity", "energy_joules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What one batch did.

    Attributes:
        seconds: Time of the batch.
        busy_s: Busy seconds by resource, averaged over its servers.
        host_busy_s: Seconds the CPU works or polls.
        medium_bytes: Bytes by (medium, read or write).
        medium_busy_s: Seconds of access by medium.
        link_bytes: Bytes over all link legs.
    """

    seconds: float
    busy_s: Mapping[str, float]
    host_busy_s: float
    medium_bytes: Mapping[tuple[str, str], float]
    medium_busy_s: Mapping[str, float]
    link_bytes: float


def energy_joules(system: System, hardware: Hardware, activity: Activity) -> dict[str, float]:
    """Return joules of one batch by component; their sum is the energy of the batch."""
    time = activity.seconds
    gpu, host = hardware.gpu, hardware.host
    gpu_busy = min(activity.busy_s.get("gpu", 0.0), time)
    host_busy = min(activity.host_busy_s, time)
    pool = pool_medium(system, hardware)
    used = {pool} | {m for m, _ in activity.medium_bytes}
    parts = {
        "GPU": gpu.active_w * gpu_busy + gpu.idle_w * (time - gpu_busy),
        "host CPU": host.active_w * host_busy + host.idle_w * (time - host_busy),
        "host DRAM": host.dram_w * time,
        "near-memory logic": hardware.expander.logic_w * time if system.near_memory else 0.0,
        "link": activity.link_bytes * 8.0 * hardware.link.pj_per_bit * 1e-12,
    }
    for name in sorted(used):
        medium = hardware.media[name]
        moved = 8e-12 * (
            activity.medium_bytes.get((name, "read"), 0.0) * medium.read_pj_per_bit
            + activity.medium_bytes.get((name, "write"), 0.0) * medium.write_pj_per_bit
        )
        busy = min(activity.medium_busy_s.get(name, 0.0), time)
        # The host's own DIMMs are counted in `host DRAM`, unless DRAM is the pool.
        is_host_dram = name == "dram" and pool != "dram"
        static = 0.0 if is_host_dram else medium.module_w * medium.modules * time
        label = "host DRAM" if is_host_dram else _label(name, pool)
        parts[label] = parts.get(label, 0.0) + static + medium.active_w * busy + moved
    return parts


def _label(medium: str, pool: str) -> str:
    return "pool medium" if medium == pool else f"log on {medium}"
