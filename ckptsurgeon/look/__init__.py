"""What reads a run and never edits it: verify, soundness, doctor."""

from __future__ import annotations

from ckptsurgeon.look.verify import Verification, inspect, verify

__all__ = ["Verification", "inspect", "verify"]
