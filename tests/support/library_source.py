"""Functions of libraries that do not import here, compiled from the library's own source.

`make test-formats` installs Megatron-Bridge, Composer, verl, NeMo and NeMo Automodel without what
they depend on; of the last one the checkpoint component imports (`automodel.py`). What they decide
by themselves, such as which checkpoint is removed, needs none of it: the text of the function is
the library's, and the names that it uses are the real ones."""

from __future__ import annotations
import __future__

import ast
from types import SimpleNamespace
from typing import Any

from tests.support.newest_megatron import beside

FOLDER = beside("sources")


def taken(file: str, names: list[str], **known: Any) -> SimpleNamespace:
    """The functions, classes and constants of `file` that are called `names`, with what else of
    their module `known` gives. `Class.method` is the bare function."""
    path = FOLDER / file
    wanted = {name: _found(ast.parse(path.read_text()), name.split(".")) for name in names}
    body = [node for name, nodes in wanted.items() for node in nodes]
    module = ast.Module(body, [])
    later = __future__.annotations.compiler_flag  # an annotation may name what is not installed
    space = dict(known)
    exec(compile(module, path, "exec", flags=later), space)
    return SimpleNamespace(**space)


def _found(tree: ast.AST, path: list[str]) -> list[ast.stmt]:
    """The statement that defines the last of `path` inside of the others."""
    here = [node for node in ast.iter_child_nodes(tree) if _name(node) == path[0]]
    assert here, f"the library has no {path[0]} any more"
    if len(path) > 1:
        return _found(here[0], path[1:])
    return [node for node in here if isinstance(node, ast.stmt)]


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", "")
