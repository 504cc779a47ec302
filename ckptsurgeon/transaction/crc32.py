"""CRC-32 of zip archives by algebra: of zeros that are never written, and of joined pieces.

A CRC is a remainder of polynomials over GF(2), so appending n bytes multiplies it by x^(8n).
Bits are reflected: bit 31 of a number is the coefficient of x^0.
"""

from __future__ import annotations

import functools
import zlib

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_ALL_ONES = 0xFFFFFFFF


@functools.lru_cache(1024)
def of_zeros(count: int) -> int:
    """The CRC of `count` zero bytes, in O(log count)."""
    return _product(_shift(count), _ALL_ONES) ^ _ALL_ONES


@functools.lru_cache(1024)
def of_repeated(byte: int, count: int) -> int:
    """The CRC of `count` times the same byte, in O(log² count)."""
    if byte == 0:
        return of_zeros(count)
    if count == 0:
        return 0
    half = of_repeated(byte, count // 2)
    out = joined(half, half, count // 2)
    return joined(out, zlib.crc32(bytes([byte])), 1) if count % 2 else out


def joined(first: int, second: int, second_length: int) -> int:
    """The CRC of two pieces one after the other, by their CRCs."""
    return _product(_shift(second_length), first) ^ second


def replaced(whole: int, old: int, new: int, bytes_after: int) -> int:
    """The CRC of `whole` after one range of it, followed by `bytes_after` bytes, changes its own
    CRC from `old` to `new` at the same length."""
    return whole ^ _product(_shift(bytes_after), old ^ new)


def _product(a: int, b: int) -> int:
    """a · b modulo the polynomial."""
    out = 0
    while a:
        if a & _ONE:
            out ^= b
        a = a << 1 & _ALL_ONES
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return out


@functools.cache
def _power(k: int) -> int:
    """x^(2^k) modulo the polynomial."""
    if k == 0:
        return _ONE >> 1
    half = _power(k - 1)
    return _product(half, half)


def _shift(count: int) -> int:
    """x^(8 · count) modulo the polynomial."""
    out, k, rest = _ONE, 3, count
    while rest:
        if rest & 1:
            out = _product(_power(k), out)
        rest >>= 1
        k += 1
    return out
