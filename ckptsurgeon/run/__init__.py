"""A training run on disk: its checkpoints, logs, attic, and who writes there."""
