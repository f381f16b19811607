"""The exception tree. Every message says what happened, where, and what to do."""

__all__ = [
    "ConfigError",
    "DataError",
    "DurabilityUnavailable",
    "PoolCorrupted",
    "PoolError",
    "PoolFull",
    "PoolLocked",
    "PoolVersionError",
    "RecoveryError",
    "TrainingCXLError",
]


class TrainingCXLError(Exception):
    """Base of everything this package raises on its own account."""


class PoolError(TrainingCXLError):
    """A pool cannot be opened or used as asked."""


class PoolLocked(PoolError):
    """Another process (or another `Pool` of this process) has the pool open for writing."""


class PoolCorrupted(PoolError):
    """Bytes of the pool contradict each other in a way no crash explains."""


class PoolFull(PoolError):
    """Space reserved for the pool is used up, or the medium has none left."""


class PoolVersionError(PoolError):
    """The pool was written by a format this build does not know."""


class DurabilityUnavailable(TrainingCXLError):
    """The medium cannot give the durability level that was asked for."""


class RecoveryError(TrainingCXLError):
    """The pool is sound but cannot be resumed as asked."""


class ConfigError(TrainingCXLError):
    """A setting is unknown, has the wrong type or contradicts the pool."""


class DataError(TrainingCXLError):
    """A data file cannot be read; names file, line and reason."""
