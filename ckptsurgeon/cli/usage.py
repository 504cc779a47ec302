"""Errors of the command line and of the operating system: what was meant, and what helps."""

from __future__ import annotations

import contextlib
import difflib
import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.hints import Hint, command, shell

KEY = re.compile(r"`[a-z_]+\.([a-z_]\w*)`")
"""A key of a recipe, as errors name it."""
TYPED_AT = "the command line"
PAIR = re.compile(r"[a-z_]\w*=.+")
NEGATIVE = re.compile(r"-(\d|\.\d)\S*")

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

    return KEY.sub(name, text.removeprefix(f"{TYPED_AT}: "))


def from_system(error: OSError) -> SurgeryError:
    """The error for what the operating system refused before anything was committed."""
    where = f"{error.filename}: " if error.filename else ""
    remedy = REMEDIES.get(error.errno or 0, command("status"))
    what = f"{where}{error.strerror or error}"
    return SurgeryError(what, untouched="nothing was committed", next=remedy)


def from_click(error: Any, words: Sequence[str]) -> UsageError:
    """The error for `words` that Click refused with `error`."""
    what = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "ckptsurgeon"
    next: Hint = shell([*path.split(), "--help"])
    if what.startswith("No such "):
        next = _meant(error, words) or next
        what = re.sub(r" \(Possible options.*|\. Did you mean.*", "", what)
    negative = [word for word in words if NEGATIVE.fullmatch(word)]
    if what.startswith("No such option") and negative:
        what = f"{negative[0]} is negative, and `{path}` takes no negative number"
        if path.endswith(" set-lr"):
            what = f"{negative[0]}: the learning rate can't be negative"
            next = "give a rate of at least 0, or a factor of the present one: 3e-5, 0.5x"
    elif what.startswith("Got unexpected extra argument") and "--set" in words:
        pairs = [word for word in words if PAIR.fullmatch(word)]
        loose = [w for w, before in zip(words[1:], words, strict=False)
                 if w in pairs and before != "--set"]  # fmt: skip
        typed = [part for word in words for part in (("--set",) if word in loose else ()) + (word,)]
        what = f"{' '.join(loose)}: each KEY=VALUE takes a --set of its own" if loose else what
        next = shell(["ckptsurgeon", *typed]) if loose else next
    elif what.startswith("Got unexpected extra argument"):
        extra = what.partition(" (")[2].rstrip(")")
        what = f"`{path}` takes no argument {extra}"
        with contextlib.suppress(OSError):  # a word that is too long for a name
            if list(words).count(extra) == 1 and Path(extra).is_dir():
                at = list(words).index(extra)
                next = shell(["ckptsurgeon", *words[:at], "-C", extra, *words[at + 1 :]])
    elif "should be a valid integer" in what:
        parameter = error.param
        argument = parameter.param_type_name == "argument"
        what = f"'{parameter.metavar if argument else parameter.opts[0]}' must be a whole number"
    elif "Input should be" in what:
        _, _, limit = what.partition("Input should be ")
        what = f"'{error.param.opts[0]}' must be {limit}"
    return UsageError(what[:1].lower() + what[1:], next=next)


def _meant(error: Any, words: Sequence[str]) -> Hint | None:
    """The command that was typed, with the command or the option that is nearest to an unknown one;
    nothing where none is near. An option's value counts as its name: --step is meant as --to STEP.
    """
    what, _, listed = error.format_message().partition("Did you mean")
    unknown = getattr(error, "option_name", what.partition("'")[2].partition("'")[0])
    known = getattr(error, "possibilities", None) or re.findall(r"'([\w-]+)'", listed)
    options = getattr(getattr(error.ctx, "command", None), "params", ())
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
