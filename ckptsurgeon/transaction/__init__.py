"""One transaction over all files: lock, journal, staging, redo, receipts."""
