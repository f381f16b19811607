"""Data: sources, the built-in data set, the batch loader. No torch until a batch is made."""

from trainingcxl.data.dataset import (
    Dataset,
    Feature,
    Jagged,
    Rows,
    Subset,
    SyntheticDataset,
    split_dataset,
)
from trainingcxl.data.loader import Batch, BatchLoader
from trainingcxl.data.source import open_data
from trainingcxl.data.synthetic_presets import SyntheticSpec, parse_spec

__all__ = [
    "Batch",
    "BatchLoader",
    "Dataset",
    "Feature",
    "Jagged",
    "Rows",
    "Subset",
    "SyntheticDataset",
    "SyntheticSpec",
    "open_data",
    "parse_spec",
    "split_dataset",
]
