"""A key of a recipe, said once: what it means, what it takes, and how a command takes it.

It stands in the type of a field: `last: Annotated[int | None, Key("…", "--last N")] = None`. The
check of a value, the option of a command and the row of docs/recipes.md are made from it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ckptsurgeon.errors import UsageError
from ckptsurgeon.files.expressions import check_pattern
from ckptsurgeon.operations.limits import ANY, Limits
from ckptsurgeon.plans.frozen import frozen


@frozen
class Key:
    """`means` is its row in docs/recipes.md, and `value` says there what it takes, where the type
    of the field does not.

    `flag` is the option of a command, `--last N`, or its argument, `[REGEX]`; that of a bool is
    given for what is not its default, and a key without a flag stands in recipes alone. `help` is
    for `--help` where `means` does not serve both."""

    means: str = ""
    flag: str = ""
    help: str = ""
    value: str = ""
    limits: Limits = ANY
    one_of: tuple[str, ...] = ()
    pattern: bool = False

    @property
    def line(self) -> str:
        """The line of `--help`."""
        return self.help or f"{self.means[:1].upper()}{self.means[1:]}."

    def check(self, name: str, value: Any) -> None:
        """Raise UsageError for what it does not take; each item of a list or mapping is a value.
        What is not given, and a text that scales the present value, passes."""
        if isinstance(value, Mapping):
            for inner, item in value.items():
                self.check(f"{name}.{inner}", item)
        elif isinstance(value, list):
            for item in value:
                self.check(name, item)
        elif value is None or value == "":
            return
        elif self.one_of and value not in self.one_of:
            raise unknown_value(value, self.one_of, name)
        elif self.pattern:
            check_pattern(name, value)
        elif not isinstance(value, str):
            limit = self.limits.broken(name.rpartition(".")[2], value)
            if limit is not None:
                raise UsageError(f"`{name}` is {value}", next=limit)


def unknown_value(text: str, known: Sequence[str], key: str) -> UsageError:
    """The error for a value that is not one of `known`, with the nearest one that is."""
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.6)
    hint = f"did you mean `{near[0]}`?" if near else f"one of: {', '.join(known)}"
    return UsageError(f"`{key}` takes no {text!r}", next=hint)
