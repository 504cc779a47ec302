"""Pickles as bytes: scanned, read as trees, and spliced; never executed."""
