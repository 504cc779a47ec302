"""The bundled trainer's config in the run, which follows a surgery where it decides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ckptsurgeon import disk, whole_file
from ckptsurgeon.files.plain_yaml import MAX_BYTES
from ckptsurgeon.plans.edits import AnyChange, Content, Rewrite
from ckptsurgeon.run.run import CONFIG, Run


def configured(run: Run, key: str) -> str | None:
    """What the config says of `key`, as YAML text; None without one."""
    path = run.root / CONFIG
    text = _text(path) if disk.is_file(path) else ""
    match = re.search(rf"^{key}: *(.*?) *$", text, re.MULTILINE)
    return match[1] if match else None


def config_changes(run: Run, values: Mapping[str, str], note: str) -> list[AnyChange]:
    """The config with these keys set (key → YAML text); nothing without a config, or where it says
    so already. Every other line stays."""
    path = run.root / CONFIG
    if not values or not disk.is_file(path):
        return []
    old = _text(path)
    text = old if old.endswith("\n") else f"{old}\n"
    for key, value in values.items():
        line = f"{key}: {value}\n"
        # A list is on the lines after its key.
        text, count = re.subn(rf"^{key}:.*\n(?:[ -].*\n)*", line, text, flags=re.MULTILINE)
        text += "" if count else line
    if text == old:
        return []
    return [Rewrite(CONFIG, "config", Content((text.encode(errors="surrogateescape"),)), note)]


def _text(path: Path) -> str:
    return whole_file.read(path, MAX_BYTES).decode("utf-8", "surrogateescape")
