"""How the trainer is started after a surgery: a section that changes nothing on disk."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar

from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.section import Section
from ckptsurgeon.plans.frozen import held


@held
class Relaunch(Section):
    """What `--relaunch` starts: ranks on this machine, and more arguments for the trainer."""

    key: ClassVar[str] = "relaunch"

    nproc_per_node: Annotated[
        int | None,
        Key(
            "ranks per node for `--relaunch`; by default as many as saved the shards", value="ranks"
        ),
    ] = None
    args: Annotated[list[str], Key("more arguments for the trainer", value="list")] = field(
        default_factory=list
    )
