"""What Typer sees of a parameter is the same on every Python."""

from __future__ import annotations

from typing import Annotated, Optional

from ckptsurgeon.cli.parameter_types import parameter_types

Name = Annotated[str | None, "the name"]


def test_an_optional_around_the_annotation_is_taken_off() -> None:
    """Python 3.10 makes one of each parameter whose default is None."""

    def act(name: Name = None, wrapped: Optional[Name] = None, plain: int | None = None) -> None:  # noqa: UP045
        raise NotImplementedError

    found = parameter_types(act)
    assert found["name"] == found["wrapped"] == Name
    assert found["plain"] == int | None
