"""The transaction of a run in a bucket: the same plans, records and receipts, by requests."""
