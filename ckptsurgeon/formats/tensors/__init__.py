"""Whose the bytes of each tensor are, side by side over all shards of a step."""
