"""Tags that are mentioned inside other events: custom_scalars layouts and hparams metrics."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ckptsurgeon.logs.tensorboard.wire import delimited, fields

Target = Callable[[bytes], bytes | None]

_TAG, _PATTERN = "tag", "pattern"
# Where the mentions are, as keys of nested messages from the Value on. A layout is the text of a
# tensor: category, chart, then the tags of a multiline chart or the three of each margin series.
_CHART = {
    0x12: {0x0A: _PATTERN},
    0x1A: {0x0A: {0x0A: _TAG, 0x12: _TAG, 0x1A: _TAG}},
}
_PLACES: dict[bytes, Any] = {
    b"custom_scalars__config__": {0x42: {0x42: {0x12: {0x12: _CHART}}}},
    # metadata, plugin_data, content, experiment, metric_infos, name, tag
    b"_hparams_/experiment": {0x4A: {0x0A: {0x12: {0x12: {0x2A: {0x0A: {0x12: _TAG}}}}}}},
}


def has_mentions(tag: bytes) -> bool:
    """Whether a value with this tag may mention others."""
    return tag in _PLACES


def rename_mentions(value: bytes, tag: bytes, target: Target, patterns: set[bytes]) -> bytes | None:
    """The Value with new names for the tags that it mentions, None when nothing changes.

    A multiline chart's tag is a regular expression: it follows when it is the old tag, literally or
    escaped. Others are added to `patterns`, for a warning."""
    return _descend(value, _PLACES[tag], target, patterns)


def _descend(message: bytes, places: Any, target: Target, patterns: set[bytes]) -> bytes | None:
    out: list[bytes] = []
    changed = False
    for key, begin, start, end in fields(message, 0, len(message)):
        new = None
        place = places.get(key)
        if place == _TAG:
            new = target(message[start:end])
        elif place == _PATTERN:
            new = _pattern(message[start:end], target, patterns)
        elif place is not None:
            new = _descend(message[start:end], place, target, patterns)
        changed = changed or new is not None
        out.append(message[begin:end] if new is None else delimited(key, new))
    return b"".join(out) if changed else None


def _pattern(pattern: bytes, target: Target, patterns: set[bytes]) -> bytes | None:
    new = target(pattern)
    if new is not None:
        return new
    plain = re.sub(rb"\\(.)", rb"\1", pattern)
    if re.escape(plain) == pattern:
        new = target(plain)
        return None if new is None else re.escape(new)
    patterns.add(pattern)
    return None
