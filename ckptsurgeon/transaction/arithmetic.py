"""New numbers from old ones, a slice at a time: bit for bit what torch makes of whole tensors.

numpy is loaded when the first number is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ckptsurgeon.plans.edits import Computed

_FLOATS = {"float64": "f8", "float32": "f4", "float16": "f2"}
ITEM = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, of each dtype that can be computed with."""
_NAN = 0x7FC0
"""A quiet NaN in bfloat16. Which one torch makes depends on the CPU: 0x7FC0 or 0xFFFF."""


def floats(data: bytes | memoryview, dtype: str, order: str = "<") -> Any:
    """The elements as an array, bfloat16 as float32. Raises KeyError unless `dtype` is in
    `ITEM`."""
    import numpy

    if dtype == "bfloat16":
        return (numpy.frombuffer(data, f"{order}u2").astype("u4") << 16).view("f4")
    return numpy.frombuffer(data, order + _FLOATS[dtype])


def from_floats(values: Any, dtype: str) -> bytes:
    """An array as elements, little-endian, each rounded to nearest, ties to even."""
    import numpy

    if dtype != "bfloat16":
        with numpy.errstate(over="ignore"):  # torch rounds to infinity as well
            return bytes(values.astype("<" + _FLOATS[dtype]).tobytes())
    with numpy.errstate(over="ignore"):
        single = values.astype("<f4")
    bits = single.view("<u4")
    wild = numpy.isnan(single)
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    odd += bits
    rounded = odd.view("<u2")[1::2]  # the upper halves
    if wild.any():
        rounded[wild] = _NAN
    return bytes(rounded.tobytes())


def computed(
    formula: Computed, terms: Sequence[bytes | memoryview], dtypes: Sequence[str]
) -> bytes | memoryview:
    """The elements that `formula` makes of a slice of each term, of which `dtypes` are the types.

    A product is taken in float32, as torch takes that of a float32 tensor and a number; a mean is
    summed up in float64, term after term, and rounded once, as is what is shrunk. Raises KeyError
    for a dtype that is no float, ValueError for a rule that is not known."""
    return next(together([formula], terms, dtypes))


def together(
    formulas: Iterable[Computed], terms: Sequence[bytes | memoryview], dtypes: Sequence[str]
) -> Iterator[bytes | memoryview]:
    """What `computed` makes of each formula, of the same slices. A mean that is rounded to masters
    and to weights is taken once."""
    import numpy

    made: dict[tuple[str, tuple[float, ...]], Any] = {}
    for formula in formulas:
        if formula.rule == "copy" and dtypes[0] == formula.dtype:
            yield terms[0]
            continue
        rule = formula.rule, formula.numbers
        if rule not in made:
            # Infinities and NaN are what torch makes of them, too.
            with numpy.errstate(all="ignore"):
                made[rule] = _values(formula, terms, dtypes)
        values = made[rule]
        if formula.via and formula.via != formula.dtype:
            values = floats(from_floats(values, formula.via), formula.via)
        yield from_floats(values, formula.dtype)


def spoilt(
    data: bytes | memoryview,
    dtype: str,
    terms: Sequence[bytes | memoryview],
    dtypes: Sequence[str],
) -> tuple[int, int] | None:
    """The first of the computed elements that is NaN or an infinity, and the number of the first of
    the terms that is one there, or -1; None where there is no such element. An infinity that every
    term has is none: a mask may hold it."""
    import numpy

    if dtype not in ITEM or not _wild(data, dtype).any():
        return None
    at = numpy.flatnonzero(_wild(data, dtype))
    new = floats(data, dtype)[at]
    old = [floats(term, kind)[at] for term, kind in zip(terms, dtypes, strict=True)]
    wrong = numpy.flatnonzero(~numpy.all([values == new for values in old], axis=0))
    if not wrong.size:
        return None
    first = wrong[0]
    source = next((i for i, values in enumerate(old) if not numpy.isfinite(values[first])), -1)
    return int(at[first]), source


def _wild(data: bytes | memoryview, dtype: str) -> Any:
    """Which elements are NaN or infinite."""
    import numpy

    if dtype == "bfloat16":
        return (numpy.frombuffer(data, "<u2") & 0x7F80) == 0x7F80
    return ~numpy.isfinite(floats(data, dtype))


def _values(formula: Computed, terms: Sequence[bytes | memoryview], dtypes: Sequence[str]) -> Any:
    import numpy

    first = floats(terms[0], dtypes[0])
    if formula.rule == "copy":
        return first
    if formula.rule == "scale":
        single = first if dtypes[0] == "float64" else first.astype("f4")
        return single * single.dtype.type(formula.numbers[0])
    if formula.rule == "ceiling":
        return numpy.minimum(first, first.dtype.type(formula.numbers[0]))
    if formula.rule == "shrink":
        other = floats(terms[1], dtypes[1]).astype("f8")
        return first.astype("f8") * numpy.sqrt(numpy.minimum(formula.numbers[0] / other, 1.0))
    if formula.rule == "mean":
        values = first.astype("f8")
        if formula.numbers[0] != 1.0:
            values *= formula.numbers[0]
        for data, dtype, weight in zip(terms[1:], dtypes[1:], formula.numbers[1:], strict=True):
            term = floats(data, dtype)
            values += term if weight == 1.0 else term.astype("f8") * weight
        values /= sum(formula.numbers)
        return values
    raise ValueError(f"no rule is called {formula.rule!r}")
