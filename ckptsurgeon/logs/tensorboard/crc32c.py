"""CRC-32C (Castagnoli), the checksum of event file records."""

from __future__ import annotations

from collections.abc import Callable

POLYNOMIAL = 0x82F63B78


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (POLYNOMIAL if byte & 1 else 0)
    return byte


TABLE = tuple(_entry(byte) for byte in range(256))


def by_table(data: bytes) -> int:
    """CRC-32C of `data` in pure Python, about 10 MB/s; for machines without google-crc32c."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _choose() -> Callable[[bytes], int]:
    try:
        from google_crc32c import cext
    except ImportError:
        return by_table
    value: Callable[[bytes], int] = cext.value
    return value


value = _choose()


def masked(data: bytes) -> int:
    """CRC-32C of `data` as a record frame stores it: rotated right by 15, plus a constant."""
    crc = value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
