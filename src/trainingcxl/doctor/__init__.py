"""What a pool would get at a path: medium, speed of its syncs, level possible, limits, advice.

Needs no torch. Nothing found here names a user or a machine; the path is shown as it was given.
"""

from trainingcxl.doctor.report import diagnose

__all__ = ["diagnose"]
