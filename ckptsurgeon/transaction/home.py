"""Where a run keeps what its surgeries need: every name below `.ckptsurgeon`."""

from __future__ import annotations

HOME = ".ckptsurgeon"
"""The folder in the run's root, and in each log folder on another file system. It holds `journal`
and `lock` while a surgery is under way, `staging/<id>` before its commit, `attic/<id>` with what it
moved aside, and `receipts/<id>`."""
