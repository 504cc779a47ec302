"""CRC-32C (Castagnoli), the checksum of event file records."""

from __future__ import annotations

from collections.abc import Callable

import google_crc32c

value: Callable[[bytes], int] = google_crc32c.value
"""CRC-32C of some bytes."""


def masked(data: bytes) -> int:
    """CRC-32C of `data` as a record frame stores it: rotated right by 15, plus a constant."""
    crc = value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
