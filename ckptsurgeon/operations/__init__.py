"""Intent becomes changes: one file per section of a recipe."""
