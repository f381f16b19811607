"""SparseFeatures: shapes that do not fit are errors that say so, never a view of other values."""

import pytest
import torch

import trainingcxl as tcxl

IDS = torch.tensor([5, 6, 7, 8, 9])


def test_lengths_and_offsets_mean_the_same():
    """Feature-major, as in TorchRec."""
    lengths = torch.tensor([2, 0, 1, 2])
    ours = tcxl.SparseFeatures(["x", "y"], IDS, lengths=lengths)
    same = tcxl.SparseFeatures(["x", "y"], IDS, offsets=torch.tensor([0, 2, 2, 3, 5]))
    assert ours.offsets.tolist() == same.offsets.tolist() == [0, 2, 2, 3, 5]
    assert ours.batch_size == 2
    assert "batch size 2" in repr(ours)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_widths(dtype):
    """F10: lengths, offsets and values of either width."""
    features = tcxl.SparseFeatures(["x"], IDS.to(dtype), lengths=torch.tensor([2, 3]).to(dtype))
    assert features.offsets.tolist() == [0, 2, 5]
    for wrong in (torch.float32, torch.int16, torch.bool):
        with pytest.raises(TypeError, match="int64 or int32"):
            tcxl.SparseFeatures(["x"], IDS.to(wrong), lengths=torch.tensor([5]))
        with pytest.raises(TypeError, match="int64 or int32"):
            tcxl.SparseFeatures(["x"], IDS, lengths=torch.tensor([1]).to(wrong))


@pytest.mark.parametrize(
    ("keys", "lengths", "words"),
    [
        (["x", "y"], [1, 1, 1, 1, 1], ["5 lengths", "2 keys", "'x', 'y'", "sum is 5"]),
        (["x", "y"], [1, 1, 1, 1], ["'x', 'y'", "batch size 2", "4", "5 values"]),
        (["x"], [3, 3], ["batch size 2", "6", "5 values"]),
        (["x"], [], ["0", "5 values"]),
        (["x", "y", "z"], [5], ["1 lengths", "3 keys"]),
    ],
)
def test_lengths_that_do_not_fit(keys, lengths, words):
    """F7: the error names keys, B and sums."""
    with pytest.raises(ValueError, match="l") as error:
        tcxl.SparseFeatures(keys, IDS, lengths=torch.tensor(lengths, dtype=torch.int64))
    for word in words:
        assert word in str(error.value)


def test_negative_lengths_are_refused(bench):
    """F4, F7: lengths that add up by chance."""
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=9, embedding_dim=2, feature_names=["x"]
    )
    bags = tcxl.EmbeddingBagCollection(
        bench.open(), tables=[config], optimizer=tcxl.optim.SGD(lr=1.0)
    )
    with pytest.raises(ValueError, match="offsets must not decrease"):
        bags(tcxl.SparseFeatures(["x"], IDS[:3] - 5, lengths=torch.tensor([4, -3, 2])))
    with pytest.raises(ValueError, match="begin with 0"):
        bags(tcxl.SparseFeatures(["x"], IDS[:3] - 5, offsets=torch.tensor([1, 3])))


def test_wrong_arguments():
    """Either lengths or offsets; keys; weights that fit."""
    with pytest.raises(ValueError, match="either lengths or offsets"):
        tcxl.SparseFeatures(["x"], IDS)
    with pytest.raises(ValueError, match="either lengths or offsets"):
        tcxl.SparseFeatures(["x"], IDS, lengths=torch.tensor([5]), offsets=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="keys are empty"):
        tcxl.SparseFeatures([], IDS, lengths=torch.tensor([5]))
    with pytest.raises(ValueError, match="-1 lengths"):
        tcxl.SparseFeatures(["x"], IDS, offsets=torch.zeros(0, dtype=torch.int64))
    for wrong in (torch.ones(4), torch.ones(5, dtype=torch.float64), torch.ones(5, 1)):
        with pytest.raises(ValueError, match="weights are"):
            tcxl.SparseFeatures(["x"], IDS, lengths=torch.tensor([5]), weights=wrong)
    with pytest.raises(TypeError, match="shape"):
        tcxl.SparseFeatures(["x"], IDS.reshape(5, 1), lengths=torch.tensor([5]))


def test_from_dense():
    """One lookup per sample and feature, from a (B, F) matrix of any strides."""
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for form in (ids, ids.t().contiguous().t()):
        features = tcxl.SparseFeatures.from_dense(["x", "y", "z"], form)
        assert features.values.tolist() == [1, 4, 2, 5, 3, 6]
        assert features.offsets.tolist() == list(range(7))
        assert features.batch_size == 2
    assert (
        tcxl.SparseFeatures.from_dense(["x"], torch.zeros(0, 1, dtype=torch.int64)).batch_size == 0
    )
    for wrong in (ids[:, :2], ids.reshape(-1), ids.reshape(1, 2, 3)):
        with pytest.raises(ValueError, match=r"\(B, 3\)"):
            tcxl.SparseFeatures.from_dense(["x", "y", "z"], wrong)


def test_select():
    """Other order, fewer keys, weights carried along; unknown names are named."""
    features = tcxl.SparseFeatures(
        ["x", "y"], IDS, lengths=torch.tensor([2, 0, 1, 2]), weights=IDS.float()
    )
    assert features.select(["x", "y"]) is features
    swapped = features.select(["y", "x"])
    assert swapped.values.tolist() == [7, 8, 9, 5, 6]
    assert swapped.weights.tolist() == [7, 8, 9, 5, 6]
    assert swapped.offsets.tolist() == [0, 1, 3, 5, 5]
    assert features.select(["y"]).values.tolist() == [7, 8, 9]
    with pytest.raises(ValueError, match=r"'z'.*'x', 'y'"):
        features.select(["x", "z"])


def test_dicts_that_do_not_fit():
    """Missing features and different batch sizes are named."""
    for_any = tcxl.SparseFeatures.from_any
    with pytest.raises(ValueError, match=r"'y'.*missing.*'x'"):
        for_any({"x": IDS}, ["x", "y"])
    with pytest.raises(ValueError, match="batch sizes"):
        for_any({"x": IDS, "y": IDS[:2]}, ["x", "y"])
