"""What each step of a batch costs on a given machine: units and seconds per unit, no totals."""

import math
from typing import TYPE_CHECKING

from trainingcxl.sim.gpu import dense_times
from trainingcxl.sim.hardware import Hardware, Medium
from trainingcxl.sim.schedule import Part, Stage, Step
from trainingcxl.sim.workload import FLOAT_BYTES, Model

if TYPE_CHECKING:
    from trainingcxl.sim.systems import System

__all__ = ["Phases"]

# Media with at least this access size are block devices: one access blocks the thread.
_BLOCK_BYTES = 512


class Phases:
    """Makes the steps of one batch, without dependencies, for a system, a machine and a model."""

    def __init__(self, system: "System", hardware: Hardware, model: Model) -> None:
        self.system = system
        self.hardware = hardware
        self.model = model
        self.dense = dense_times(hardware.gpu, model)
        self.medium_name = system.medium or hardware.expander.medium
        self.medium = hardware.media[self.medium_name]
        self.is_block = self.medium.access_bytes >= _BLOCK_BYTES
        self.unique = model.locality.unique_share
        self.spread = model.locality.update_balance
        self.layers = sum(len(part) for part in model.layers)

    def lookup(self) -> Step:
        """Read and reduce every row of every bag (symbol A)."""
        raw = 1.0
        if not self.system.relaxed_lookup:
            # Rows written by the previous batch are read while the medium still settles.
            raw += self.model.locality.reuse * (self.medium.read_after_write - 1.0)
        if not self.system.near_memory:
            return self._host_step("lookup", "embedding", [self._host_access("read", 1.0, raw)])
        moved = self._padded_bytes()
        parts = [self._channel_part("read", moved, raw)]
        balance = self.model.locality.lookup_balance
        return self._near_step("lookup", parts, moved, balance)

    def update(self) -> Step:
        """Read, modify and write every distinct row (symbol Up)."""
        if not self.system.near_memory:
            kinds = [self._host_access(kind, self.unique) for kind in ("read", "write")]
            return self._host_step("update", "embedding", kinds)
        moved = self._padded_bytes() * self.unique
        parts = [self._channel_part(kind, moved) for kind in ("read", "write")]
        return self._near_step("update", parts, moved, self.spread)

    def expand(self) -> Step:
        """Expand and coalesce the gradients in host DRAM."""
        host = self.hardware.host
        moved = host.expand_passes * self.model.lookup_bytes
        part = Part("read", moved, 1e-9 / host.expand_gbps, 1.0, "dram")
        return self._host_step("expand", "embedding", [part])

    def bottom_forward(self) -> Step:
        """Bottom MLP forward (symbol Bf)."""
        return self._gpu_step("bottom_forward", "bottom MLP", self.dense.bottom_forward)

    def top(self) -> Step:
        """Interaction, top MLP forward and backward (symbol Tt)."""
        return self._gpu_step("top", "top MLP", self.dense.top)

    def bottom_backward(self) -> Step:
        """Bottom MLP backward and SGD of the dense part (symbol Bb)."""
        return self._gpu_step("bottom_backward", "bottom MLP", self.dense.bottom_backward)

    def to_gpu(self) -> list[Step]:
        """Move the reduced embeddings to the GPU (symbol X)."""
        return self._movement("vectors", ("memory", "gpu"), self.model.pooled_bytes)

    def to_memory(self) -> list[Step]:
        """Move the gradients of the reduced embeddings back (symbol X)."""
        return self._movement("gradients", ("gpu", "memory"), self.model.pooled_bytes)

    def correction(self) -> Step:
        """Send what the previous update changed in vectors that were looked up too early."""
        moved = self.model.pooled_bytes * self.system.correction
        steps = self._movement("correct", ("memory", "gpu"), moved)
        return Step(
            name="correct",
            category="transfer",
            stages=tuple(stage for step in steps for stage in step.stages),
            latency_s=sum(step.latency_s for step in steps),
            is_host_driven=steps[0].is_host_driven,
        )

    def log_rows(self) -> list[Step]:
        """Log the distinct rows of the batch (symbol Lg)."""
        moved = self.model.update_bytes
        if not self.system.near_memory:
            return self._host_log_rows(moved)
        read = self._channel_part("read", self._padded_bytes() * self.unique)
        write = self._channel_part("write", moved)
        if self.system.hardware_movement or not self.system.host_bounced_log:
            return [self._near_step("log_rows", [read, write], balance=self.spread)]
        return [
            self._near_step("log_rows_read", [read], balance=self.spread),
            self._send("log_rows_out", "checkpoint", "memory_to_host", moved),
            self._send("log_rows_back", "checkpoint", "host_to_memory", moved),
            self._near_step("log_rows_write", [write]),
        ]

    def _host_log_rows(self, moved: float) -> list[Step]:
        if self.medium_name == "pmem" or not self._logs_to_storage():
            kinds = [self._host_access(kind, self.unique) for kind in ("read", "write")]
            return [self._host_step("log_rows", "checkpoint", kinds)]
        steps = [self._storage_write("log_rows", moved)]
        if not self.is_block:
            # Rows of a block medium are in host DRAM already, as the update has just read them.
            read = self._host_step(
                "log_rows_read", "checkpoint", [self._host_access("read", self.unique)]
            )
            steps.insert(0, read)
        return steps

    def log_dense(self) -> list[Step]:
        """Log the MLP parameters (symbol Ml), or a slice of them when relaxed."""
        share = 1.0 / self.system.dense_every if self.system.relaxed_dense_log else 1.0
        moved = self.model.dense_bytes * share
        if self.system.near_memory and self.system.hardware_movement:
            stages = (
                self._link_stage("gpu_to_memory", moved),
                Stage("channel", (self._channel_part("write", moved),)),
            )
            return [Step(name="log_dense", category="checkpoint", stages=stages)]
        pull = self._dense_copies(moved, share)
        if self.system.near_memory:
            write = self._near_step("log_dense", [self._channel_part("write", moved)])
            return [*pull, write]
        if self._logs_to_storage():
            return [*pull, self._storage_write("log_dense", moved)]
        lines = moved / self.hardware.host.line_bytes
        store = self._line_part("write", lines, 1.0)
        return [*pull, self._host_step("log_dense", "checkpoint", [store])]

    def _dense_copies(self, moved: float, share: float) -> list[Step]:
        """Copies of the dense part to where it is logged, layer by layer when software does it."""
        legs = ["gpu_to_host", "host_to_memory"] if self.system.near_memory else ["gpu_to_host"]
        steps = []
        if not self.system.hardware_movement:
            calls = len(legs) * self.layers * share
            steps.append(self._calls("log_dense_calls", "checkpoint", calls))
        steps += [self._send(f"log_dense_{leg}", "checkpoint", leg, moved) for leg in legs]
        return steps

    def _logs_to_storage(self) -> bool:
        return self.medium_name in ("dram", "ssd", "cxl_dram")

    def _movement(self, name: str, ends: tuple[str, str], moved: float) -> list[Step]:
        source, target = ends
        if self.system.hardware_movement:
            places = (
                ends
                if self.system.near_memory
                else tuple(e.replace("memory", "host") for e in ends)
            )
            stage = self._link_stage(f"{places[0]}_to_{places[1]}", moved)
            latency = self.hardware.link.start_s
            return [Step(name=name, category="transfer", stages=(stage,), latency_s=latency)]
        if self.system.near_memory:
            legs = [f"{source}_to_host", f"host_to_{target}"]
        else:
            legs = [f"{source}_to_{target}".replace("memory", "host")]
        steps = []
        for leg in legs:
            steps.append(self._calls(f"{name}_call_{leg}", "transfer", 1.0))
            steps.append(self._send(f"{name}_{leg}", "transfer", leg, moved))
        return steps

    def _calls(self, name: str, category: str, count: float) -> Step:
        """Driver calls: a thread of its own makes them, so lookups do not delay them."""
        stage = Stage("driver", (Part("call", count, self.hardware.software.call_s),))
        return Step(name=name, category=category, stages=(stage,), is_host_driven=True)

    def _send(self, name: str, category: str, leg: str, moved: float) -> Step:
        """Copy by software: the host waits for it."""
        stage = self._link_stage(leg, moved)
        return Step(name=name, category=category, stages=(stage,), is_host_driven=True)

    def _link_stage(self, leg: str, moved: float) -> Stage:
        seconds = 1e-9 / self.hardware.link.bandwidth_gbps
        return Stage(f"link.{leg}", (Part("send", moved, seconds, 1.0),))

    def _host_step(self, name: str, category: str, parts: list[Part]) -> Step:
        stage = Stage("host", tuple(parts))
        return Step(name=name, category=category, stages=(stage,), is_host_driven=True)

    def _gpu_step(self, name: str, category: str, kernels: tuple[float, ...]) -> Step:
        stage = Stage("gpu", (Part("compute", sum(kernels), 1.0),), weights=kernels)
        return Step(name=name, category=category, stages=(stage,))

    def _near_step(
        self, name: str, parts: list[Part], computed: float = 0.0, balance: float = 1.0
    ) -> Step:
        """Bulk work on the channels; the computing logic streams `computed` bytes behind them."""
        stages = [Stage("channel", tuple(parts), balance=balance)]
        if computed:
            seconds = 1e-9 / self.hardware.expander.logic_gbps
            part = Part("compute", computed, seconds)
            stages.append(Stage("logic", (part,), balance=balance))
        latency = _latency_ns(self.medium, parts[0].kind) * 1e-9
        category = "checkpoint" if name.startswith("log") else "embedding"
        return Step(name=name, category=category, stages=tuple(stages), latency_s=latency)

    def _channel_part(self, kind: str, moved: float, slower: float = 1.0) -> Part:
        rate = self.medium.read_gbps if kind == "read" else self.medium.write_gbps
        return Part(kind, moved, slower * 1e-9 / rate, 1.0, self.medium_name)

    def _storage_write(self, name: str, moved: float) -> Step:
        ssd = self.hardware.media["ssd"]
        part = Part("write", moved, 1e-9 / (ssd.write_gbps * ssd.modules), 1.0, "ssd")
        stage = Stage("storage", (part,))
        return Step(name=name, category="checkpoint", stages=(stage,), is_host_driven=True)

    def _host_access(self, kind: str, share: float, slower: float = 1.0) -> Part:
        """Access `share` of the batch's rows from the CPU: outstanding lines, or blocking pages."""
        if self.is_block:
            latency = _latency_ns(self.medium, kind) * 1e-9
            pages = self._accesses(self.medium.access_bytes) * share
            return Part(kind, pages, slower * latency, self.medium.access_bytes, self.medium_name)
        lines = self._accesses(self.hardware.host.line_bytes) * share
        return self._line_part(kind, lines, slower)

    def _line_part(self, kind: str, lines: float, slower: float) -> Part:
        host, medium = self.hardware.host, self.medium
        rate = medium.read_gbps if kind == "read" else medium.write_gbps
        by_latency = _latency_ns(medium, kind) / host.outstanding_lines
        by_bandwidth = host.line_bytes / (rate * medium.modules)
        seconds = slower * max(by_latency, by_bandwidth) * 1e-9
        return Part(kind, lines, seconds, host.line_bytes, self.medium_name)

    def _accesses(self, unit: int) -> int:
        """Accesses of `unit` bytes that all lookups of the batch need."""
        model = self.model
        return model.batch * sum(
            t.count * t.lookups * math.ceil(t.dim * FLOAT_BYTES / unit) for t in model.tables
        )

    def _padded_bytes(self) -> int:
        return self._accesses(self.medium.access_bytes) * self.medium.access_bytes


def _latency_ns(medium: Medium, kind: str) -> float:
    return medium.read_latency_ns if kind == "read" else medium.write_latency_ns
