"""The law of a map's lines: those that are alike are one, and written out they are all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.operations.transplant_map import (
    FILLED,
    FRESH,
    REFUSED,
    Mapped,
    Named,
    ParameterMap,
)
from ckptsurgeon.report import parameter_map
from ckptsurgeon.report.style import Style

LOOK = Style(color=False, width=10_000)


def printed(rows: list[Mapped]) -> list[str]:
    """The lines of the rows, with single spaces; each with its label, which stands once."""
    made = ParameterMap(1, Path("/old"), 6, tuple(rows), (), 0, ())
    lines = parameter_map(made, "new", LOOK).splitlines()[2:]
    out: list[str] = []
    for line in lines[: lines.index("")]:
        words = line.split() if line[2] != " " else [out[-1].split()[0], *line.split()]
        out.append(" ".join(words))
    return out


def written_out(line: str) -> Iterator[str]:
    """Every line that a line with letters stands for."""
    ranges = re.findall(r"\b([ijk]) = (\d+(?:–\d+|(?:, \d+)*))", line)
    text = re.sub(r",? ?\b[ijk] = \d+(?:–\d+|(?:, \d+)*)", "", line).strip()
    values = []
    for _, said in ranges:
        first, _, last = said.partition("–")
        values.append(range(int(first), int(last) + 1) if last else map(int, said.split(", ")))
    letters = [letter for letter, _ in ranges]
    for numbers in product(*values):
        yield re.sub(
            r"\{([ijk])([+-]\d+)?\}",
            lambda m, numbers=numbers: str(numbers[letters.index(m[1])] + int(m[2] or 0)),
            text,
        )


def row(name: str, source: str, state: str, more: int) -> Mapped:
    if state == FRESH:
        return Mapped(name, (more,), FRESH, ())
    if state == REFUSED:
        why = SurgeryError(f"{name} is not as 1{name} is", next="nothing")
        return Mapped(name, (more,), REFUSED, (), (), (), (why,))
    return Mapped(name, (8,), FILLED, (), (Named(source, (8,)),))


NUMBER = st.integers(0, 3)
PATTERNS = st.sampled_from(["layers.{}.w", "{}.b", "blocks.{}.{}", "e.{}.{}.x.{}", "norm", "a1.{}"])


@st.composite
def maps(draw: st.DrawFn) -> list[Mapped]:
    found = {}
    for _ in range(draw(st.integers(1, 4))):
        pattern, other = draw(PATTERNS), draw(PATTERNS)
        state, more = draw(st.sampled_from([FILLED, FILLED, FRESH, REFUSED])), draw(NUMBER)
        for numbers in draw(st.sets(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=12)):
            name = pattern.format(*numbers)
            source = other.format(*(number + more for number in numbers))
            found[name] = row(name, source, state, more)
    return draw(st.permutations(list(found.values())))


@given(maps())
@example([row(f"layers.{i}.w", f"{i + 2}.w", FILLED, 2) for i in range(48)])
@example([row("norm", "a", FILLED, 0), row("norm", "a", FILLED, 0)])
def test_the_lines_written_out_are_those_of_each_parameter(rows: list[Mapped]) -> None:
    lines = printed(rows)
    alone = [line for each in rows for line in printed([each])]
    assert sorted(text for line in lines for text in written_out(line)) == sorted(alone)


def test_a_model_of_many_layers_is_a_few_lines() -> None:
    rows = [row("embed.weight", "wte.weight", FILLED, 0)]
    for i in range(48):
        rows += [row(f"layers.{i}.{w}", f"{i + 2}.{w}", FILLED, 0) for w in ("q", "k")]
        rows += [row(f"layers.{i}.e.{j}.w", f"l.{i}.{j}", FILLED, 0) for j in range(4)]
    assert printed(rows) == [
        "embed.weight [8] ← wte.weight",
        "layers.{i}.q [8] ← {i+2}.q, i = 0–47",
        "layers.{i}.k [8] ← {i+2}.k, i = 0–47",
        "layers.{i}.e.{j}.w [8] ← l.{i}.{j}, i = 0–47, j = 0–3",
    ]
    odd = [each for each in rows if each.name != "layers.7.k"]
    assert "layers.{i}.k [8] ← {i+2}.k, i = 0, 1, 2 … (47)" in printed(odd)
