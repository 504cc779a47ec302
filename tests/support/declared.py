"""Modules that a library imports and does not call here, put in place of what is not installed."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def put(name: str, folders: list[str], **held: Any) -> None:
    """A package of just this, whose modules are in `folders`: its `__init__` is left out."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = folders
    vars(module).update(held)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
