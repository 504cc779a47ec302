"""Changes, edits, plans and receipts as JSON documents, and back."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from ckptsurgeon.plans.edits import (
    Append,
    Aside,
    Change,
    Checksum,
    Computed,
    Content,
    Each,
    Elements,
    Fill,
    Hole,
    Link,
    Move,
    NewName,
    NewStep,
    NewText,
    Relink,
    Renamed,
    Replace,
    Rewrite,
    Span,
    Tail,
    Truncate,
)
from ckptsurgeon.plans.plan import Fingerprint, Plan, Receipt
from ckptsurgeon.plans.promise import Promise
from ckptsurgeon.plans.queries import Queries
from ckptsurgeon.plans.record_types import made
from ckptsurgeon.plans.sources import Columns, Decoded, Encoded, Scales, Source, Woven

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Fill, Elements, Source, Columns, Woven, Decoded, Encoded, Scales, Computed, Checksum,
        Renamed, Each, Change, NewText, NewName, NewStep, Aside, Span, Hole, Content, Link, Queries,
        Rewrite, Relink, Move, Replace, Append, Truncate, Tail, Fingerprint, Promise, Plan, Receipt,
    )
}  # fmt: skip


def to_json(value: Any) -> Any:
    """What a JSON encoder's `default` makes of one of the values above: its own level only, the
    encoder asks for the others. Bytes are base64; tuples become lists."""
    if _KINDS.get(type(value).__name__) is type(value):
        document = {"kind": type(value).__name__, **vars(value)}
        if document.get("chunks") == 1:
            del document["chunks"]  # of the many that are one: as receipts have always had them
        if isinstance(value, Columns) and (value.cells, value.step) == (1, 0):
            del document["cells"], document["step"]
        if isinstance(value, Receipt) and not value.launch:
            del document["launch"]
        if isinstance(value, Move) and value.mtime_ns is None:
            del document["ino"], document["mtime_ns"]
        if isinstance(value, Each):
            document["keys"] = _numbers(value.keys)
        return document
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def _numbers(keys: tuple[Any, ...]) -> Any:
    """The keys; of numbers in a row, as those of parameters nearly always are, the ends."""
    first, last = keys[0], keys[-1]
    if type(first) is int and type(last) is int and keys == tuple(range(first, last + 1)):
        return {"first": first, "last": last}
    return keys


MAX_KEYS = 1 << 22
"""Keys that the ranges of one document stand for: no run has so many parameters."""


class Malformed(ValueError):
    """A document that was not written here, with what is wrong in it."""


def parsed(data: bytes) -> Any:
    """What `to_json` was made of, from the bytes of the JSON. Raises Malformed, in a sentence that
    begins with the byte where the JSON ends, for any that was not written here."""
    try:
        document = json.loads(data)
    except json.JSONDecodeError as error:
        where = f"byte {error.pos} of {len(data)}: {error.msg}" if data else "it is empty (0 bytes)"
        raise Malformed(where) from None
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{type(error).__name__}: {str(error)[:200]}") from None
    return from_json(document)


def from_json(document: Any) -> Any:
    """What `to_json` was made of. Raises Malformed on a document that it did not write."""
    try:
        return _Reading().value(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Malformed(f"{type(error).__name__}: {str(error)[:200]}") from None


class _Reading:
    """One document: `left` keys may still come out of its ranges."""

    def __init__(self) -> None:
        self.left = MAX_KEYS
        self.known: dict[str, Callable[[Any], Any]] = {
            # A recipe is the user's own words: a tag in it may be called "kind".
            "recipe": _as_it_is,
            # Numbers and names, thousands of them.
            "spans": _spans,
        }

    def value(self, document: Any) -> Any:
        if isinstance(document, list):
            return tuple([self.value(item) for item in document])
        if isinstance(document, dict):
            if set(document) == {"base64"}:
                return base64.b64decode(document["base64"])
            kind = document.get("kind")
            if kind == "Each" and len(document) == 2:
                return Each(self.keys(document["keys"]))
            if isinstance(kind, str) and kind in _KINDS:
                values = {
                    k: self.known.get(k, self.value)(v) for k, v in document.items() if k != "kind"
                }
                if kind in ("Computed", "Elements") and "told" in values:
                    values["label"] = values.pop("told")  # as 1.0.0 called it
                value = made(_KINDS[kind], values)
                return _by_kind(value) if kind == "Change" and not value.path else value
            return {key: self.value(item) for key, item in document.items()}
        # A receipt of 10,000 shards says the same few names and keys 60,000 times.
        return sys.intern(document) if type(document) is str else document

    def keys(self, document: Any) -> tuple[Any, ...]:
        if not isinstance(document, dict):
            if not document or not set(map(type, document)) <= {bool, int, str}:
                raise ValueError("keys that are no numbers and no names")
            return tuple(document)
        first, last = document["first"], document["last"]
        if type(first) is not int or type(last) is not int or not first <= last:
            raise ValueError("keys from no first to no last number")
        self.left -= last - first + 1
        if self.left < 0:
            raise ValueError(f"ranges of more than {MAX_KEYS} keys")
        return tuple(range(first, last + 1))


def _by_kind(change: Change) -> Change:
    """A change without a path as records have it in which these kinds had no names of their own."""
    file, field, old, new = change.file, change.field, change.old, change.new
    if isinstance(new, Renamed):
        return NewName(file, field, old, new)
    return NewText(file, field, old, new) if field == "latest" else change


def _as_it_is(document: Any) -> Any:
    return document


def _spans(document: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    """Pairs of bytes [start, end), ascending and at least one."""
    spans = tuple(map(tuple, document))
    numbers = [number for span in spans for number in span]
    if not spans or any(len(span) != 2 for span in spans) or set(map(type, numbers)) != {int}:
        raise ValueError("spans that are no pairs of numbers")
    if numbers[0] < 0 or any(a > b for a, b in pairwise(numbers)):
        raise ValueError("spans that do not ascend")
    return spans
