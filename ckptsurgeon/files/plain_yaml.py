"""Plain data from a YAML file or from KEY=VALUE texts; the only module that imports OmegaConf.

Such a file is data from anywhere: resolvers are off; aliases, tags, duplicate keys, deep nesting
and files over 1 MB are refused before a value is read.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon import whole_file
from ckptsurgeon.errors import UsageError, count

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MISREAD = re.compile(
    r"<<|[-+]?\d[\d_]*(:\d+)+(\.\d*)?|[-+]?0\d+|[-+]?0[xX][\da-fA-F_]+|[-+]?0b[01_]+"
)
"""Plain scalars that mean a merge, or a number of base 60 (12:30 is 750), 8 (010 is 8), 16 or 2: of
0x10, 0.10 or 10x may be meant."""
ENDLESS = re.compile(r"[-+]?(\d[\d_]{99,}|0[xX][\da-fA-F_]{99,}|0b[01_]{99,})")
"""Plain scalars that mean a whole number which Python may not even be able to write down."""
NUMBER = re.compile(r"[-+]?(?:0|[1-9]\d*)(\.\d*)?([eE][-+]?\d+)?")
"""What YAML and a reader take for the same number."""


FIXES = {
    "duplicate key": "write each key once",
    "'\\t'": "indent with spaces, not with tabs",
    "another document": "keep one document in a file, without ---",
    "expected ',' or": "close each { and [",
}
"""What helps against an error of the YAML reader, by a word of it."""
RARE = ", and what your optimizer's param groups hold: `show` lists them"


def read(path: Path) -> dict[str, Any]:
    """The mapping that the YAML file `path` holds.

    Raises OSError, and UsageError with the line for broken YAML."""
    try:
        raw = whole_file.read(path, MAX_BYTES)
    except OSError as error:
        if error.errno not in (errno.EFBIG, errno.EINVAL, errno.EAGAIN):
            raise
        raise UsageError(
            f"{path}: {error.strerror}",
            next="check that this is the recipe, a file on the disk, and not another",
        ) from None
    return decoded(raw, str(path))


def decoded(raw: bytes, where: str) -> dict[str, Any]:
    """The mapping that these bytes hold; `where` names them in an error, which is a UsageError."""
    try:
        return parse(raw.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: byte {error.start}: not UTF-8 text", next="save it as UTF-8"
        ) from None


def scalar(text: str) -> Any:
    """`text` as the value of a YAML key; a text that is not YAML stays a text."""
    number = NUMBER.fullmatch(text) if len(text) < 40 else None
    if number is not None:  # YAML says the same, and takes longer to load than the surgery does
        return float(text) if number[1] or number[2] else int(text)
    try:
        return parse(f"value: {text}" if text else "value: ''", "the command line")["value"]
    except UsageError:
        return text


def lay(data: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """`data` with `section.key=value` texts laid over it.

    Raises UsageError for a key that two of the texts give: which one is meant can't be told."""
    merged = dict(data)
    earlier: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if earlier.setdefault(key, value) != value:
            raise UsageError(
                f"`{key}` is given twice: {earlier[key]} and {value}", next="give each key once"
            )
        *sections, last = key.split(".")
        if not equals or not last:
            raise UsageError(f"{setting!r} is not KEY=VALUE", next="for example: set.lr=3e-5")
        inner = merged
        for section in sections:
            below = inner.get(section)
            inner[section] = dict(below) if isinstance(below, Mapping) else {}
            inner = inner[section]
        inner[last] = scalar(value)
    return merged


def unknown_key(
    key: str,
    known: Sequence[str],
    where: str,
    synonyms: Mapping[str, str] | None = None,
    rare: Sequence[str] = (),
) -> UsageError:
    """The error for a key that does not exist, with the nearest one that does. `synonyms` says
    which keys another program's name means, and `rare` are keys too many to list."""
    word = key.rpartition(".")[2].lower().replace("-", "_").removeprefix("adam_")
    words = {name.rpartition(".")[2]: name for name in (*known, *rare)}
    meant = [name for name in (synonyms or {}).get(word, "").split() if name in words]
    meant = meant or difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    hint = f"the keys are: {', '.join(known)}{RARE if rare else ''}"
    if meant:
        hint = f"did you mean {' and '.join(f'`{words[name]}`' for name in meant)}?"
    inside = f"{where}: " if where else ""
    return UsageError(f"{inside}unknown key `{key}`", next=hint)


def parse(text: str, where: str) -> dict[str, Any]:
    """The mapping that `text` holds; `where` names the text in an error."""
    import yaml
    from omegaconf import OmegaConf

    fix = "quote texts that hold `: ` or `#`, for example: why: 'spike: roll back'"
    try:
        _refuse_tricks(yaml.parse(text, Loader=yaml.SafeLoader), where)
        loaded = OmegaConf.create(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        fix = next((text for word, text in FIXES.items() if word in problem), fix)
        raise UsageError(f"{where}{line}: {problem}", next=fix) from None
    except RecursionError:
        raise UsageError(f"{where}: nested too deep", next="a recipe has two levels") from None
    except ValueError as error:
        raise UsageError(f"{where}: {str(error).splitlines()[0]}", next=fix) from None
    data = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(data, dict):
        raise UsageError(
            f"{where}: a recipe is a mapping of sections", next="see recipes/ for examples"
        )
    return {str(key): value for key, value in data.items()}


def _refuse_tricks(events: Iterator[Any], where: str) -> None:
    depth, before = 0, ""
    for event in events:
        line = event.start_mark.line + 1
        name = type(event).__name__
        if before == "DocumentStartEvent" and name != "MappingStartEvent":
            raise UsageError(
                f"{where}: a recipe is a mapping of sections", next="see recipes/ for examples"
            )
        before = name
        if name == "AliasEvent" or getattr(event, "anchor", None):
            raise UsageError(
                f"{where}:{line}: anchors and aliases are refused", next="write it out"
            )
        if getattr(event, "tag", None):
            raise UsageError(
                f"{where}:{line}: tag {event.tag} is refused", next="write a plain value"
            )
        if name == "ScalarEvent" and "${" in event.value:
            raise UsageError(
                f"{where}:{line}: ${{…}} is never expanded in a recipe",
                next="write the value itself",
            )
        if name == "ScalarEvent" and event.implicit[0] and ENDLESS.fullmatch(event.value):
            raise UsageError(
                f"{where}:{line}: a number of {count(len(event.value), 'digit')}",
                next="quote a text",
            )
        if name == "ScalarEvent" and event.implicit[0] and MISREAD.fullmatch(event.value):
            raise UsageError(
                f"{where}:{line}: YAML reads {event.value} as something else",
                next="quote a text; write a number in base 10, without `:` and leading zeros",
            )
        if name in ("MappingStartEvent", "SequenceStartEvent"):
            depth += 1
        elif name in ("MappingEndEvent", "SequenceEndEvent"):
            depth -= 1
        if depth > MAX_DEPTH:
            raise UsageError(
                f"{where}:{line}: nested deeper than {MAX_DEPTH}", next="a recipe has two levels"
            )
