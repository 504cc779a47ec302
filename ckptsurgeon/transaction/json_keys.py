"""An object of JSON with other names for its keys, and not another byte changed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

TOKEN = re.compile(rb'(?P<text>"(?:[^"\\]|\\.)*")(?P<key>\s*:)?|[{}\[\]]')


def keys_renamed(line: bytes, new: Mapping[str, str]) -> bytes:
    """The keys of an object, at its top, by other names; every other byte stays."""
    out, at, depth = bytearray(), 0, 0
    for token in TOKEN.finditer(line):
        if token[0] in b"{[":
            depth += 1
        elif token[0] in b"}]":
            depth -= 1
        elif depth == 1 and token["key"]:
            key = json.loads(token["text"])
            if new.get(key, key) != key:
                out += line[at : token.start()] + json.dumps(new[key]).encode()
                at = token.end("text")
    return bytes(out + line[at:])
