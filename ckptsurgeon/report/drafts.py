"""The draft of a page on a trainer, as YAML that a person goes on with, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptsurgeon.hints import Hint
from ckptsurgeon.hints import text as as_line
from ckptsurgeon.report.document import SCHEMA
from ckptsurgeon.report.style import clean

if TYPE_CHECKING:
    from ckptsurgeon.formats.described.draft import Draft


def draft(drafted: Draft, next: Hint) -> str:
    """The page, and in a comment what tries it."""
    return f"{draft_page(drafted)}# next: {as_line(next)}"


def draft_page(drafted: Draft) -> str:
    """The page, with what a person must look at in comments before it."""
    lines = [f"# look: {clean(sentence)}" for sentence in drafted.unsure]
    return "\n".join([*lines, *_lines(drafted.page, "")]) + "\n"


def _lines(data: Mapping[str, Any], indent: str) -> list[str]:
    """Mappings a key a line, but for a pointer; a list in one."""
    import yaml

    out = []
    for key, value in data.items():
        name = _flow(yaml, str(key))
        if isinstance(value, Mapping) and key not in ("pointer", "fields"):
            out += [f"{indent}{name}:", *_lines(value, f"{indent}  ")]
        else:
            out.append(f"{indent}{name}: {_flow(yaml, value)}")
    return out


def _flow(yaml: Any, value: Any) -> str:
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6
    )
    return str(text).removesuffix("...\n").strip()


def draft_json(folder: Path, drafted: Draft) -> dict[str, Any]:
    """The document of `draft-format`."""
    return {
        "schema": SCHEMA,
        "run": str(folder.resolve()),
        "page": drafted.page,
        "unsure": list(drafted.unsure),
    }
