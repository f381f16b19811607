"""PyTorch modules whose rows live in a pool."""

from trainingcxl.nn.collection import EmbeddingBagCollection, EmbeddingBagConfig
from trainingcxl.nn.embedding_bag import EmbeddingBag
from trainingcxl.nn.features import SparseFeatures

__all__ = ["EmbeddingBag", "EmbeddingBagCollection", "EmbeddingBagConfig", "SparseFeatures"]
