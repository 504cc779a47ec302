"""A surgery as data: what it changes on which file, and what the next step will use."""
