"""TrainingCXL: recommendation-model training in persistent memory, every batch durable.

Public names are imported on first use, so that `trainingcxl inspect` and `trainingcxl.sim` need no
torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_HOME = {
    "EmbeddingBag": "nn",
    "EmbeddingBagCollection": "nn",
    "EmbeddingBagConfig": "nn",
    "FaultTolerantRun": "checkpoint",
    "Pool": "pool",
    "Profile": "profile",
    "SparseFeatures": "nn",
    "errors": "errors",
    "inspect": "pool",
    "optim": "optim",
    "verify": "pool",
}

__all__ = list(_HOME)

try:
    __version__ = version("trainingcxl")
except PackageNotFoundError:  # running from a source tree, as the simulator does
    __version__ = "0+source"


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'trainingcxl' has no attribute '{name}'")
    module = import_module(f"trainingcxl.{home}")
    return module if name == home else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
