"""Errors of the simulator; each names what is wrong, where, and what to do."""

__all__ = ["ConservationError", "ParameterError", "parameter_error"]


class ParameterError(ValueError):
    """A parameter, model, trace or profile is unknown, malformed or out of range."""


class ConservationError(RuntimeError):
    """A run lost or invented bytes or time: a fault of the simulator, never of the input."""


def parameter_error(what: str, *, where: str, do: str) -> ParameterError:
    """Build the one message layout used for bad input.

    Args:
        what: The key and the offending value.
        where: The file or option that holds it.
        do: The allowed range or the nearest known key.
    """
    return ParameterError(f"{what}\n  where: {where}\n  do:    {do}")
