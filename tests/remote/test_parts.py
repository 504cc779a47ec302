"""What a new object is put together from is what was asked for, in parts that a store takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.plans.edits import Hole
from ckptsurgeon.remote import parts
from ckptsurgeon.remote.parts import Range, Segment

SIZES = st.one_of(
    st.integers(0, 100),
    st.integers(parts.LEAST - 2, 2 * parts.LEAST + 2),
    st.integers(0, 3 * parts.MOST),
)
SEGMENTS = st.one_of(
    SIZES.map(lambda size: Range("key", "etag", 7, 7 + size)),
    SIZES.map(Hole),
    st.binary(max_size=40),
)


def stretches(segments: list[Segment]) -> list[list[object]]:
    """The segments with those that go on from the one before joined to it."""
    out: list[list[object]] = []
    for each in (each for each in segments if parts.size(each)):
        last = out[-1] if out else [None, None]
        if isinstance(each, Range) and last[0] == "range" and last[2] == each.start:
            last[2] = each.end
        elif isinstance(each, Range):
            out.append(["range", each.start, each.end])
        elif isinstance(each, Hole) and last[0] == "hole":
            last[1] = int(str(last[1])) + each.size
        elif isinstance(each, Hole):
            out.append(["hole", each.size])
        elif isinstance(each, bytes) and isinstance(last[1], bytes):
            last[1] += each
        else:
            out.append(["bytes", each])
    return out


@given(st.lists(SEGMENTS, max_size=6))
def test_parts_are_what_was_asked_for(segments: list[Segment]) -> None:
    made = parts.parts(segments)
    assert stretches([each for part in made for each in part.segments]) == stretches(segments)
    assert all(part.size >= parts.LEAST for part in made[:-1])
    assert all(part.size <= parts.MOST for part in made)
    for part in made:
        assert part.copied is not None or part.size <= parts.SENT + 2 * parts.LEAST
