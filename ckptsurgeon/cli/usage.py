"""Errors of the command line and of the operating system: what was meant, and what helps."""

from __future__ import annotations

import contextlib
import difflib
import errno
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ckptsurgeon.cli.values import NoSuchCommand, Refused, Unexpected
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.hints import Hint, again, command, shell

KEY = re.compile(r"`[a-z_]+\.([A-Za-z_]\w*)`")
"""A key of a recipe, as errors name it."""
PAIR = re.compile(r"[a-z_]\w*=.+")
NEGATIVE = re.compile(r"-(\d|\.\d)\S*")

OF_A_ROLLBACK = {
    "set": ("--set", ""), "set-lr": ("--set", "lr="), "reset": ("--reset", ""),
    "skip": ("--skip", ""),
}  # fmt: skip
"""Commands that a rollback has as an option, and what stands before its value there."""
REMEDIES: dict[int, Hint] = {
    errno.EACCES: "run as the user who owns it, or change its permissions",
    errno.EPERM: "run as the user who owns it, or change its permissions",
    errno.EROFS: "mount it writable, then run the same command again",
    errno.ENOSPC: "free some space, then run the same command again",
    errno.EDQUOT: "free some space, then run the same command again",
    errno.ENOENT: "check the path: it does not exist",
}
"""What helps against an error of the operating system."""


@contextlib.contextmanager
def as_typed(parameters: Mapping[str, Any]) -> Iterator[None]:
    """Let an error name what was typed, as `--params`, and not the key of the recipe that it stands
    for, as `graft.params`. `parameters` are those of the command, with their types."""
    try:
        yield
    except UsageError as error:
        error.what = _typed(error.what, parameters)
        error.hints = tuple(
            _typed(hint, parameters) if isinstance(hint, str) else hint for hint in error.hints
        )
        raise


def _typed(text: str, parameters: Mapping[str, Any]) -> str:
    def name(match: re.Match[str]) -> str:
        for info in get_args(parameters.get(match[1]))[1:]:
            shown = info.metavar if info.__class__.__name__ == "ArgumentInfo" else info.default
            if isinstance(shown, str):  # where Typer keeps the first name of an option
                return re.sub(r"[\[\].]", "", shown)
        return f"`{match[1]}`"

    return KEY.sub(name, text)


def from_system(error: OSError) -> SurgeryError:
    """The error for what the operating system refused before anything was committed."""
    if error.errno == errno.ENOENT and not error.filename:  # as getcwd says it
        what = "the folder that you are in is gone: it was moved or removed"
        return SurgeryError(what, untouched="nothing was committed", next=again("-C", "RUN"))
    where = f"{error.filename}: " if error.filename else ""
    remedy = REMEDIES.get(error.errno or 0, command("status"))
    what = f"{where}{error.strerror or error}"
    return SurgeryError(what, untouched="nothing was committed", next=remedy)


def from_click(error: Any, words: Sequence[str], known: Collection[str]) -> UsageError:
    """The error for `words` that Click, or one of our own checks, refused with `error`; `known` are
    the names of all commands."""
    context = getattr(error, "ctx", None)
    typed = next((word for word in words if word in known), "")
    path = context.command_path if context is not None else f"ckptsurgeon {typed}".rstrip()
    help = shell([*path.split(), "--help"])
    if isinstance(error, Refused):
        return UsageError(error.message, next=help)
    if isinstance(error, Unexpected):
        return _unexpected(error.words, words, path, help)
    if isinstance(error, NoSuchCommand):
        options = context.command.params if context is not None else ()
        near = _meant(error.name, error.known, options, words)
        return UsageError(f"no such command {error.name!r}", next=near or help)
    if hasattr(error, "possibilities"):  # Click's NoSuchOption, which is public in no package
        return _no_option(error, words, path, help)
    what = error.format_message().rstrip(".")
    return UsageError(what[:1].lower() + what[1:], next=help)


def _unexpected(extra: Sequence[str], words: Sequence[str], path: str, help: Hint) -> UsageError:
    """What to say of words that the command at `path` does not take."""
    if error := loose_pairs(words):
        return error
    what, folder = " ".join(extra), extra[0]
    with contextlib.suppress(OSError):  # a word that is too long for a name
        if len(extra) == 1 and list(words).count(folder) == 1 and Path(folder).is_dir():
            at = list(words).index(folder)
            help = shell(["ckptsurgeon", *words[:at], "-C", folder, *words[at + 1 :]])
    return UsageError(f"`{path}` takes no argument {what}", next=help)


def loose_pairs(words: Sequence[str]) -> UsageError | None:
    """What to say of each KEY=VALUE among `words` that follows the one of a --set; None where none
    does."""
    if "--set" not in words:
        return None
    loose = [word for word, before in zip(words[1:], words, strict=False)
             if PAIR.fullmatch(word) and before != "--set"]  # fmt: skip
    if not loose:
        return None
    typed = [part for word in words for part in (("--set",) if word in loose else ()) + (word,)]
    return UsageError(
        f"{' '.join(loose)}: each KEY=VALUE takes a --set of its own",
        next=shell(["ckptsurgeon", *typed]),
    )


def _no_option(error: Any, words: Sequence[str], path: str, help: Hint) -> UsageError:
    """What to say of an option that the command at `path` has not, or of a negative number."""
    negative = next((word for word in words if NEGATIVE.fullmatch(word)), None)
    if negative is not None and path.endswith(" set-lr"):
        return UsageError(
            f"{negative}: the learning rate can't be negative",
            next="give a rate of at least 0, or a factor of the present one: 3e-5, 0.5x",
        )
    if negative is not None:
        return UsageError(
            f"{negative} is negative, and `{path}` takes no negative number", next=help
        )
    name = path.rpartition(" ")[2]
    if error.option_name == "--to" and name in OF_A_ROLLBACK:
        what = f"`{path}` takes no --to: it edits the latest step"
        return UsageError(what, next=_rollback(name, words))
    options = error.ctx.command.params
    near = _meant(error.option_name, error.possibilities or (), options, words)
    return UsageError(f"no such option: {error.option_name}", next=near or help)


def _rollback(name: str, words: Sequence[str]) -> Hint:
    """The rollback that does at another step what was typed with a --to."""
    at = words.index(name) + 1
    typed = " ".join(words[at:]).replace("--to=", "--to ").split(" ")
    to = typed.index("--to")
    given = [word for word in typed[:to] + typed[to + 2 :] if not word.startswith("-")]
    if name == "set" and len(given) == 2 and not any("=" in word for word in given):
        given = ["=".join(given)]
    flag, before = OF_A_ROLLBACK[name]
    options = [part for word in given for part in (flag, before + word)]
    step = typed[to + 1 : to + 2] or ["STEP"]
    return shell(["ckptsurgeon", *words[: at - 1], "rollback", "--to", *step, *options])


def _meant(
    unknown: str, known: Sequence[str], options: Sequence[Any], words: Sequence[str]
) -> Hint | None:
    """The command that was typed, with the command or the option that is nearest to an unknown one;
    nothing where none is near. An option's value counts as its name: --step is meant as --to STEP.
    """
    near = [
        option.opts[0]
        for option in options
        if option.param_type_name == "option" and unknown == f"--{option.metavar}".lower()
    ] or difflib.get_close_matches(unknown, known, n=1, cutoff=0.7)
    places = [i for i, word in enumerate(words) if word.partition("=")[0] == unknown]
    if not near or not places:
        return None
    first = places[0]
    meant = near[0] + words[first][len(unknown) :]
    return shell(["ckptsurgeon", *words[:first], meant, *words[first + 1 :]])
