"""The pages that come with ckptsurgeon, a user's own, and the shortest one: `torch:PATH=KEYS`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import UsageError
from ckptsurgeon.formats.described.description import Description
from ckptsurgeon.formats.described.layout import Described
from ckptsurgeon.formats.described.own_page import OwnPage

TORCH = "torch:"


@cache
def shipped(name: str) -> Described:
    """The format of a page in this folder."""
    page = Description.read(Path(__file__).parent / f"{name}.yaml")
    return OwnPage(page) if page.counts_epochs or page.logged else Described(page)


def named(name: str, known: Sequence[str]) -> Described:
    """The format that `name` stands for: a page of `known`, the path of one, `torch:PATH=KEYS`."""
    if disk.is_file(Path(__file__).parent / f"{name}.yaml"):
        return shipped(name)
    if name.startswith(TORCH):
        return OwnPage(_torch(name))
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        try:
            return OwnPage(Description.read(path))
        except OSError as error:
            raise UsageError(
                f"{path}: {error.strerror}", next="--format FILE    the path of a description"
            ) from None
    raise UsageError(
        f"no format is called {name!r}",
        next=f"--format FILE.yaml, --format torch:PATH=KEYS, or one of {', '.join(known)}",
    )


def _torch(name: str) -> Description:
    """Torch files by their path from the run, with an optimizer's state dict under KEYS (joined by
    dots, nothing for the whole file). Without {step} in the path, each is step 0."""
    path, equals, keys = name.removeprefix(TORCH).rpartition("=")
    if not path or not equals:
        raise UsageError(
            f"{name!r} is not torch:PATH=KEYS",
            next="for example: --format torch:step_{step}/optimizer.pt= "
            "or --format torch:model_{step}.pt=optimizer",
        )
    data = {
        "name": "torch files",
        "files": {path: {"optimizers": [[part for part in keys.split(".") if part]]}},
    }
    return Description.of(data, "--format", numbered=False)
