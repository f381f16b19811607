"""States of every global random generator, as JSON data (bytes in base64)."""

import base64
import random
from typing import Any

import numpy as np
import torch

__all__ = ["get_rng_state", "set_rng_state"]


class _Cache:
    """Generators that were not used since the last commit keep their encoded form."""

    def __init__(self) -> None:
        self.raw = b""
        self.encoded = ""

    def encode(self, raw: bytes) -> str:
        if raw != self.raw:
            self.raw, self.encoded = raw, base64.b64encode(raw).decode()
        return self.encoded


_torch_cache, _numpy_cache, _python_cache = _Cache(), _Cache(), _Cache()


def get_rng_state() -> dict[str, Any]:
    """States of torch (CPU, and CUDA once it is in use), NumPy's legacy generator and Python's
    `random`.
    """
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": _torch_cache.encode(torch.get_rng_state().numpy().tobytes()),
        "numpy": [
            _numpy_cache.encode(np.asarray(keys, dtype="<u4").tobytes()),
            int(position),
            int(has_gauss),
            gauss,
        ],
        "python": [
            version,
            _python_cache.encode(np.array(internal, dtype="<u4").tobytes()),
            gauss_next,
        ],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [
            base64.b64encode(s.numpy().tobytes()).decode() for s in torch.cuda.get_rng_state_all()
        ]
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `get_rng_state` returned."""
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    keys, position, has_gauss, gauss = state["numpy"]
    array = np.frombuffer(base64.b64decode(keys), dtype="<u4")
    np.random.set_state(("MT19937", array, position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    words = np.frombuffer(base64.b64decode(internal), dtype="<u4")
    random.setstate((version, tuple(int(word) for word in words), gauss_next))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_bytes_tensor(s) for s in state["cuda"]])


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
