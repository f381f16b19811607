"""Reference models."""

__all__ = ["DLRM"]

from trainingcxl.models.dlrm import DLRM
