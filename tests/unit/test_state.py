"""State as data: what goes into a pool comes out the same, and nothing else goes in."""

import collections
import random

import numpy as np
import pytest
import torch
from torch import nn

from trainingcxl.errors import PoolCorrupted
from trainingcxl.rng import get_rng_state, set_rng_state
from trainingcxl.state import BlobParts, decode_blob, decode_tree, encode_tree, json_bytes


def through_blob(tree):
    """Writes the blob as the native core does, and reads it back."""
    parts = BlobParts(tree)
    import ctypes

    data = b"".join(ctypes.string_at(address, size) for address, size in parts.pieces() if size)
    assert len(data) == parts.num_bytes
    assert len(data) % 64 == 0 or not parts.pieces()
    return decode_blob(np.frombuffer(data, dtype=np.uint8))


def same(a, b):
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b) or (a.isnan() == b.isnan()).all()
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert type(a) is type(b)
        assert a == b or (a != a and b != b)


DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4), (65,)])
def test_tensors_of_every_type_and_shape(dtype, shape):
    """D3: dense parameters, buffers and optimizer state come back bit for bit."""
    values = torch.randint(-3, 3, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    same(
        {"a": values, "b": [values, values.clone()]},
        through_blob({"a": values, "b": [values, values.clone()]}),
    )


def test_strided_and_shared_tensors():
    """Views are stored as they look; a transposed weight too."""
    base = torch.arange(24.0).reshape(4, 6)
    tree = {
        "t": base.t(),
        "s": base[::2, ::3],
        "e": torch.ones(1).expand(3, 4),
        "p": nn.Parameter(base),
    }
    back = through_blob(tree)
    for name, tensor in tree.items():
        assert torch.equal(back[name], tensor.detach())
    assert back["t"].is_contiguous()


def test_plain_data_of_every_kind():
    """Schedulers, scalers and counters keep all of these."""
    tree = {
        "none": None,
        "true": True,
        "int": 2**70,
        "float": 0.1,
        "nan": float("nan"),
        "inf": -float("inf"),
        "text": "\u00e4\ud800",
        "bytes": b"\0\xff",
        "tuple": (1, (2, [3])),
        "list": [],
        "dict": {},
        "int keys": {1: "a", 2: "b"},
        "tuple keys": {(1, 2): 3},
        "$tensor": 5,
        "dollar": {"$tuple": [1]},
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "ordered": dict([("b", 1), ("a", 2)]),
    }
    same(tree, decode_tree(encode_tree(tree, []), []))
    same(tree, through_blob(tree))
    counter = collections.Counter({"a": 2})
    assert decode_tree(encode_tree({"c": counter}, []), []) == {"c": {"a": 2}}
    assert decode_tree(encode_tree(np.float32(1.5), []), []) == 1.5
    assert decode_tree(encode_tree(torch.Size([1, 2]), []), []) == (1, 2)


@pytest.mark.parametrize("value", [{1, 2}, object(), lambda: 0, 1j, nn.Linear(1, 1), open])
def test_other_objects_are_refused_by_name(value):
    """Nothing is pickled: the error names the place in the state."""
    with pytest.raises(TypeError, match=r"state\.a\[1\] is a "):
        encode_tree({"a": [0, value]}, [])
    with pytest.raises(TypeError, match=r"state\.t is a tensor"):
        encode_tree({"t": torch.zeros(1)}, None)


def test_optimizer_and_scheduler_states():
    """Adam after a step, a scheduler, a gradient scaler's dict."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    tree = {"o": optimizer.state_dict(), "s": scheduler.state_dict()}
    back = through_blob(tree)
    same(tree, back)
    other = torch.optim.Adam(nn.Linear(3, 2).parameters(), amsgrad=True)
    other.load_state_dict(back["o"])
    assert float(other.state_dict()["state"][0]["step"]) == 1.0


def test_damaged_blobs_are_refused():
    """Sizes and structure that cannot be true."""
    good = BlobParts({"a": torch.arange(5.0)})
    import ctypes

    data = b"".join(ctypes.string_at(a, n) for a, n in good.pieces())
    size = int.from_bytes(data[:8], "little")
    for bad in (
        b"",
        data[:4],
        data[: 8 + size // 2],
        data[: 8 + size],
        (2**63).to_bytes(8, "little") + data[8:],
        json_header({"tree": {}}),
        json_header([]),
        json_header({"tree": {"$tensor": 3}, "tensors": []}),
        json_header({"tree": {}, "tensors": [["float8", [1], 0]]}),
        json_header({"tree": {}, "tensors": [["float32", [-1], 0]]}),
        json_header({"tree": {}, "tensors": [["float32", [2**40], 0]]}),
        json_header({"tree": {}, "tensors": [["float32", [4], 2**40]]}),
        json_header({"tree": {"$tuple": 5}, "tensors": []}),
    ):
        with pytest.raises(PoolCorrupted):
            decode_blob(np.frombuffer(bad, dtype=np.uint8))


def json_header(data):
    raw = json_bytes(data)
    return len(raw).to_bytes(8, "little") + raw


def test_generators_are_put_back():
    """Python's, NumPy's and torch's generators go on as if nothing had happened, through JSON."""
    import json

    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    random.gauss(0, 1)
    np.random.standard_normal()

    def draw():
        return (
            torch.rand(3).tolist(),
            [random.gauss(0, 1) for _ in range(3)],
            np.random.standard_normal(3).tolist(),
        )

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        state = json.loads(json_bytes(get_rng_state()))
        first = draw()
        draw()
        set_rng_state(state)
        assert draw() == first
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
