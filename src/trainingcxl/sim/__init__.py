"""The paper's hardware, simulated: SSD, PMEM, DRAM, PCIe, CXL-D, CXL-B, CXL (needs no torch).

Every result is a model, never a measurement; `docs/simulator.md` states what it rests on.
"""

from trainingcxl.sim.errors import ConservationError, ParameterError
from trainingcxl.sim.hardware import Hardware, load_hardware
from trainingcxl.sim.simulate import Result, simulate
from trainingcxl.sim.systems import SYSTEMS, System, find_system
from trainingcxl.sim.targets import TARGETS, evaluate_targets
from trainingcxl.sim.workload import Locality, Model, find_model, load_models, model_set

__all__ = [
    "SYSTEMS",
    "TARGETS",
    "ConservationError",
    "Hardware",
    "Locality",
    "Model",
    "ParameterError",
    "Result",
    "System",
    "evaluate_targets",
    "find_model",
    "find_system",
    "load_hardware",
    "load_models",
    "model_set",
    "simulate",
]
