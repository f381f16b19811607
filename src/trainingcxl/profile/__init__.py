"""Where the time and the bytes of each batch go: `tcxl.Profile` (see docs/performance.md)."""

from trainingcxl.profile.profile import Profile, ProfileRequest
from trainingcxl.profile.scalars import require_tensorboard

__all__ = ["Profile", "ProfileRequest", "require_tensorboard"]
