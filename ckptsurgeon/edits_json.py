"""Changes, edits, plans and receipts as JSON documents, and back."""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from typing import Any

from ckptsurgeon.edits import (
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
    Relink,
    Renamed,
    Replace,
    Rewrite,
    Source,
    Span,
    Tail,
    Truncate,
)
from ckptsurgeon.plans import Fingerprint, Plan, Receipt
from ckptsurgeon.promise import Promise

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Fill, Elements, Source, Computed, Checksum, Renamed, Each, Change, Aside, Span, Hole,
        Content, Link, Rewrite, Relink, Move, Replace, Append, Truncate, Tail, Fingerprint, Promise,
        Plan, Receipt,
    )
}  # fmt: skip


def to_json(value: Any) -> Any:
    """What a JSON encoder's `default` makes of one of the values above: its own level only, the
    encoder asks for the others. Bytes are base64; tuples become lists."""
    if _KINDS.get(type(value).__name__) is type(value):
        document = {"kind": type(value).__name__, **vars(value)}
        if document.get("chunks") == 1:
            del document["chunks"]  # of the many that are one: as receipts have always had them
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


def _keys(document: Any) -> tuple[Any, ...]:
    if isinstance(document, dict):
        return tuple(range(document["first"], document["last"] + 1))
    return tuple(document)


def _as_it_is(document: Any) -> Any:
    return document


def _pairs(document: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, document))


_READ: dict[str, Any] = {
    # A recipe is the user's own words: a tag in it may be called "kind".
    "recipe": _as_it_is,
    # Numbers and names, thousands of them.
    "spans": _pairs,
    "keys": _keys,
}


def from_json(document: Any) -> Any:
    """What `to_json` was made of. Raises KeyError or TypeError on a document it did not write."""
    if isinstance(document, list):
        return tuple(from_json(item) for item in document)
    if isinstance(document, dict):
        if set(document) == {"base64"}:
            return base64.b64decode(document["base64"])
        if "kind" in document and document["kind"] in _KINDS:
            kind = _KINDS[document["kind"]]
            made = {k: _READ.get(k, from_json)(v) for k, v in document.items()}
            del made["kind"]
            return kind(**made)
        return {key: from_json(item) for key, item in document.items()}
    # A receipt of 10,000 shards says the same few names and keys 60,000 times.
    return sys.intern(document) if type(document) is str else document
