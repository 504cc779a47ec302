"""-C s3://BUCKET/PREFIX: a command reads the run there through a mirror, and writes objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ckptsurgeon.cli.commands import IN_BUCKETS
from ckptsurgeon.cli.options import Cancelled, Common
from ckptsurgeon.errors import UsageError
from ckptsurgeon.hints import Hint, again, command
from ckptsurgeon.remote import reads
from ckptsurgeon.remote.address import Address
from ckptsurgeon.report import terminal

NEW_RUN = "fork", "folder"
"""The command and its argument that take an address beside -C."""


@contextmanager
def at_hand(common: Common, name: str, given: Mapping[str, Any]) -> Iterator[Common]:
    """The options with a folder in place of an address. Whatever names the folder is printed as the
    address. Raises UsageError for what is not possible there, before anything is fetched."""
    _refuse_elsewhere(common, {k: v for k, v in given.items() if (name, k) != NEW_RUN})
    address = Address.of(common.run_dir)
    if address is None:
        yield common
        return
    if name not in IN_BUCKETS:
        raise UsageError(
            f"`{name}` is not possible in a bucket yet",
            next="copy the run to a disk, and name its folder there with -C",
        )
    for each in given.values():
        if option := getattr(each, "shared", ""):
            raise UsageError(
                f"{option} is not possible in a bucket yet: its helpers have no mirror",
                next=again(
                    without=[option, each.on] if each.on else [option],
                    why="reads with threads of this process",
                ),
            )
    if any(getattr(each, "relaunch", False) for each in given.values()):
        raise _not_started("--relaunch", again(without=["--relaunch"], why="edits the run"))
    if name == "relaunch" and not given["print_flags"]:
        print_flags = command(name, "--print-flags", why="for a trainer of Megatron")
        raise _not_started("`relaunch`", "start the trainer by its own command", print_flags)
    from ckptsurgeon.remote.mirror import mirrored

    try:
        with mirrored(address) as (bucket, folder):
            terminal.call(str(bucket), f"s3://{address.bucket}")
            yield replace(common, run_dir=folder)
    except KeyboardInterrupt:
        raise Cancelled("stopped by Ctrl-C", next=again()) from None


def branch(folder: Path, hard_link: bool, logs: bool) -> Path | None:
    """The folder of the mirror that stands for the address of a new run; None for a folder of a
    disk. Raises UsageError where the run that is forked lies elsewhere, or for an option of a
    disk."""
    address, mirror = Address.of(folder), reads.current()
    if mirror is None:
        if address is not None:
            raise UsageError(
                f"{address}: the run lies on this disk, and so must its fork",
                next="DIR is a new directory",
            )
        return None
    bucket = Path(mirror.root).name
    if address is None or address.bucket != bucket:
        raise UsageError(
            f"{address or folder}: the run lies in s3://{bucket}, and so must its fork",
            next=f"DIR is s3://{bucket}/PREFIX",
        )
    for option in ["--hard-link"] * hard_link + ["--logs"] * logs:
        raise UsageError(f"{option} is not possible in a bucket", next=again(without=[option]))
    return Path(mirror.root, address.prefix)


def _not_started(what: str, *instead: Hint) -> UsageError:
    read = command("verify", "--log", "FILE", why="of a trainer that was started there")
    return UsageError(
        f"{what} is not possible in a bucket: the trainer reads the run elsewhere",
        next=(*instead, read),
    )


def _refuse_elsewhere(common: Common, given: Mapping[str, Any]) -> None:
    """Raise UsageError for an address in any other place than -C."""
    bundles = [common, *filter(is_dataclass, given.values())]
    typed = [(item.name, getattr(each, item.name)) for each in bundles for item in fields(each)]
    for name, value in (*typed, *given.items()):
        if name in ("run_dir", "why"):
            continue
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(each, (str, Path)) and str(each).startswith("s3:/") for each in values):
            raise UsageError(
                "only -C takes an address in a bucket yet",
                next="copy it to a disk, and name the file or folder there",
            )
