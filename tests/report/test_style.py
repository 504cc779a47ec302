"""How a value and a number are written."""

from __future__ import annotations

import pytest

from ckptsurgeon.plans.edits import (
    ZEROS,
)
from ckptsurgeon.report.style import number, size, value


@pytest.mark.parametrize(
    ("field", "item", "text"),
    [
        ("lr", 3e-5, "3.000e-05"),
        ("eps", 1e-8, "1e-08"),
        ("betas", (0.9, 0.999), "0.9, 0.999"),
        ("skip", [[1, 2], [5, 5]], "1-2, 5"),
        ("skip", [], "none"),
        ("exp_avg", ZEROS, "zeros"),
        ("latest", None, "nothing"),
        ("latest", "a\033[2Jb\n", r"'a\x1b[2Jb\n'"),
        ("seed", 1234, "1234"),
    ],
)
def test_values_are_written_as_people_write_them(field: str, item: object, text: str) -> None:
    assert value(field, item) == text


def test_numbers_keep_every_digit_they_need() -> None:
    assert [number(x) for x in (2048.0, 0.1, 1e-8, 0.1234567890123)] == [
        "2048", "0.1", "1e-08", "0.1234567890123",
    ]  # fmt: skip
    assert number(184.41830399999932) == "184.418304"  # computed: its last digits say nothing
    assert [size(x) for x in (0, 999, 1200, 2.5e12)] == ["0 B", "999 B", "1.2 kB", "2.5 TB"]
