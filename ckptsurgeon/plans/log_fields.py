"""What the changes of a plan are called that are made to logs."""

from __future__ import annotations

TENSORBOARD, LOGS = "tensorboard", "logs"
"""`Rewrite.field` and `Aside.field` of an event file, and of a log of another kind."""
LOG_FIELDS = (TENSORBOARD, LOGS)
