"""State dicts as data: JSON for structure, raw bytes for tensors. Nothing is ever pickled or
executed.

A dense generation's blob (docs/format.md) is: u64 header length, JSON header {"tree", "tensors"},
then the tensors' bytes, each 64-byte aligned. In the tree a tensor is {"$tensor": index}.
"""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainingcxl.errors import PoolCorrupted

__all__ = ["BlobParts", "decode_blob", "decode_tree", "encode_tree", "json_bytes", "plain_states"]

_ALIGN = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def encode_tree(value: Any, tensors: list[Tensor] | None, where: str = "state") -> Any:
    """`value` as JSON data; its tensors are appended to `tensors`.

    Raises:
        TypeError: Something that is no plain data, or a tensor where `tensors` is None; names
            where.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if tensors is None:
            raise TypeError(f"{where} is a tensor, only plain data fits here")
        tensors.append(value)
        return {"$tensor": len(tensors) - 1}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$array": [value.dtype.str, list(value.shape), data]}
    if isinstance(value, np.generic):
        return encode_tree(value.item(), tensors, where)
    if isinstance(value, list | tuple):
        items = [encode_tree(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, where)
    raise TypeError(
        f"{where} is a {type(value).__name__}; only tensors, arrays, numbers, strings, bytes, "
        "lists, tuples and dicts are kept in a pool\n"
        "  do:    return plain data from state_dict()"
    )


def _encode_mapping(value: Mapping[Any, Any], tensors: list[Tensor] | None, where: str) -> Any:
    pairs = [(key, encode_tree(item, tensors, f"{where}.{key}")) for key, item in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    where = f"a key of {where}"
    return {"$dict": [[encode_tree(key, None, where), item] for key, item in pairs]}


def decode_tree(data: Any, tensors: list[Tensor]) -> Any:
    """Inverse of `encode_tree`."""
    if isinstance(data, list):
        return [decode_tree(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((tag, body),) = data.items()
        if tag == "$tensor":
            return tensors[body]
        if tag == "$bytes":
            return base64.b64decode(body)
        if tag == "$array":
            dtype, shape, raw = body
            return np.frombuffer(base64.b64decode(raw), dtype=np.dtype(dtype)).reshape(shape).copy()
        if tag == "$tuple":
            return tuple(decode_tree(item, tensors) for item in body)
        if tag == "$dict":
            return {decode_tree(key, tensors): decode_tree(item, tensors) for key, item in body}
    return {key: decode_tree(item, tensors) for key, item in data.items()}


def json_bytes(data: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(data, separators=(",", ":")).encode()


class BlobParts:
    """A tree laid out as a blob: (address, bytes) pieces that the native core copies, without a
    copy of ours.

    Keeps its tensors alive; take the pieces to the core before the next optimizer step.
    """

    def __init__(self, tree: Any) -> None:
        tensors: list[Tensor] = []
        data = encode_tree(tree, tensors)
        # Of a CUDA or strided tensor this is a host copy, taken now; of a plain CPU tensor it is
        # the tensor itself.
        self._tensors = [tensor.detach().cpu().contiguous() for tensor in tensors]
        offset, listed = 0, []
        for tensor in self._tensors:
            name = str(tensor.dtype).removeprefix("torch.")
            if name not in _DTYPES:
                raise TypeError(
                    f"a tensor of the dense part has dtype {tensor.dtype}, which a pool cannot keep"
                )
            offset = -(-offset // _ALIGN) * _ALIGN
            listed.append([name, list(tensor.shape), offset])
            offset += tensor.nbytes
        header = json_bytes({"tree": data, "tensors": listed})
        header += b" " * (-(8 + len(header)) % _ALIGN)
        self._header = np.frombuffer(len(header).to_bytes(8, "little") + header, dtype=np.uint8)
        self._padding = np.zeros(_ALIGN, dtype=np.uint8)

    def pieces(self) -> list[tuple[int, int]]:
        """Addresses and sizes, in order."""
        result = [(self._header.ctypes.data, self._header.nbytes)]
        for tensor in self._tensors:
            result.append((tensor.data_ptr(), tensor.nbytes))
            if tensor.nbytes % _ALIGN:
                result.append((self._padding.ctypes.data, _ALIGN - tensor.nbytes % _ALIGN))
        return result

    @property
    def num_bytes(self) -> int:
        """Size of the blob."""
        return sum(size for _, size in self.pieces())


_WAY_OUT = (
    "\n  state: nothing was changed; its checksum is right, so it was written like that\n"
    "  do:    use the trainingcxl that wrote it; 'trainingcxl rewind POOL --list' shows older ones"
)


def decode_blob(blob: npt.NDArray[np.uint8]) -> Any:
    """The tree of a blob, with tensors of their own memory.

    Raises:
        PoolCorrupted: The blob does not hold what its header says.
    """
    try:
        size = int.from_bytes(blob[:8].tobytes(), "little")
        header = json.loads(blob[8 : 8 + size].tobytes())
        body = blob[8 + size :]
        tensors: list[Tensor] = []
        for name, shape, offset in header["tensors"]:
            dtype = _DTYPES[name]
            count = math.prod(shape)
            raw = body[offset : offset + count * dtype.itemsize]
            if min(shape, default=0) < 0 or offset < 0 or raw.nbytes != count * dtype.itemsize:
                raise PoolCorrupted(
                    f"the dense part ends in tensor {len(tensors)}, of shape {shape}{_WAY_OUT}"
                )
            tensor = torch.empty(shape, dtype=dtype)
            if count:
                tensor.view(-1).view(torch.uint8).numpy()[:] = raw
            tensors.append(tensor)
        return decode_tree(header["tree"], tensors)
    except (KeyError, IndexError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PoolCorrupted(
            f"the dense part of the pool cannot be read: {error!r}{_WAY_OUT}"
        ) from error


def plain_states(objects: Mapping[str, Any]) -> dict[str, Any]:
    """State dicts of `objects` as JSON data, without those that hold tensors: a dense generation
    has them.
    """
    plain = {}
    for name, item in objects.items():
        try:
            plain[name] = encode_tree(item.state_dict(), None)
        except TypeError:
            continue
    return plain
