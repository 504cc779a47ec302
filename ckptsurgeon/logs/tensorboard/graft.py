"""Summary metadata for events that lose the event which carried it.

TF1's FileWriter writes the metadata of a tag (which dashboard it belongs to) with its first event
only. TensorBoard needs it on the first event that it reads, so a file that starts later gets it
there. Every other writer repeats the metadata, and nothing changes.
"""

from __future__ import annotations

from typing import Any

from ckptsurgeon.logs.tensorboard.event_file import Index
from ckptsurgeon.logs.tensorboard.frame import OVERHEAD, frame
from ckptsurgeon.logs.tensorboard.message import metadata_of, with_metadata


def grafts(index: Index, flags: Any) -> dict[int, bytes]:
    """New bytes of the records that need the metadata of an event without a flag, by record."""
    import numpy as np

    chosen = np.asarray(flags, bool)
    if not len(chosen) or chosen[: int(chosen.sum())].all():
        return {}  # the start of the file: all first events are there
    tags = np.frombuffer(memoryview(index.tags), np.int32)  # type: ignore[arg-type]
    groups: dict[str, list[int]] = {}
    for number, group in enumerate(index.names):
        for tag in group:
            groups.setdefault(tag, []).append(number)
    out: dict[int, bytes] = {}
    with index.path.open("rb") as file:

        def payload(record: int) -> bytes:
            start, end = index.span(record)
            file.seek(start + 12)
            return file.read(end - start - OVERHEAD)

        for tag, numbers in groups.items():
            where = tags == numbers[0] if len(numbers) == 1 else np.isin(tags, numbers)
            first = int(where.argmax())
            metadata = None if chosen[first] else metadata_of(payload(first), tag)
            if metadata is None:
                continue
            where &= chosen
            heir = int(where.argmax())
            if where[heir]:
                message = out[heir][12:-4] if heir in out else payload(heir)
                new = with_metadata(message, tag, metadata)
                if new is not None:
                    out[heir] = frame(new)
    return out
