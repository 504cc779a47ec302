"""The transaction log of an offline run of W&B: its framing, its records, and the run as a log."""
