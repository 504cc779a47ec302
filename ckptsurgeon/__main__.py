"""`python -m ckptsurgeon`, for where the script is not on the path."""

from __future__ import annotations

from ckptsurgeon.cli import main

main()
