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
from ckptsurgeon.hints import TYPED, Hint, again, command, shell

KEY = re.compile(r"`((?:[a-z_]+\.)*[A-Za-z_]\w*)`|\bset\.([a-z_]\w*)")
"""A key of a recipe, as errors name it, by itself or in its section; and in a list of keys."""
PAIR = re.compile(r"[a-z_]\w*=.+")
STEP = re.compile(r".*\d|latest")
NEGATIVE = re.compile(r"-(\d|\.\d)\S*")

OF_A_ROLLBACK = {
    "set": ("--set", ""), "set-lr": ("--set", "lr="), "reset": ("--reset", ""),
    "skip": ("--skip", ""),
}  # fmt: skip
"""Commands that a rollback has as an option, and what stands before its value there."""
MEANT = {
    "revert": "undo", "restore": "undo", "ls": "status", "list": "status", "history": "log",
    "resume": "relaunch", "start": "relaunch", "branch": "fork", "check": "verify",
    "clean": "prune", "lr": "set-lr",
}  # fmt: skip
"""What other programs call a command."""
SOURCES = ("--from", "--at")
"""What other commands call the step that they start from."""
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
def as_typed(name: str, parameters: Mapping[str, Any]) -> Iterator[None]:
    """Let an error name what was typed, as `--params`, and not the key of the recipe that it stands
    for, as `graft.params`. `parameters` are those of the command `name`, with their types."""
    try:
        yield
    except SurgeryError as error:
        error.what = _typed(error.what, name, parameters)
        error.hints = tuple(
            _typed(hint, name, parameters) if isinstance(hint, str) else hint
            for hint in error.hints
        )
        raise


def _typed(text: str, command_name: str, parameters: Mapping[str, Any]) -> str:
    def name(match: re.Match[str]) -> str:
        if match[2]:
            return match[2]
        keys = match[1].split(".")
        for key in reversed(keys):
            for info in get_args(parameters.get(key))[1:]:
                shown = info.metavar if info.__class__.__name__ == "ArgumentInfo" else info.default
                if isinstance(shown, str):  # where Typer keeps the first name of an option
                    word = re.sub(r"[\[\].]", "", shown)
                    return "the argument" if "|" in word else word
        if keys == [command_name.replace("-", "_")]:
            return f"`{command_name}`"
        return f"`{keys[-1]}`"

    return KEY.sub(name, text)


def from_system(error: OSError, untouched: str = "nothing was committed") -> SurgeryError:
    """The error for what the operating system refused before anything was committed."""
    if error.errno == errno.ENOENT and not error.filename:  # as getcwd says it
        what = "the folder that you are in is gone: it was moved or removed"
        return SurgeryError(what, untouched=untouched, next=again("-C", "RUN"))
    where = f"{error.filename}: " if error.filename else ""
    remedy = REMEDIES.get(error.errno or 0, command("status"))
    what = f"{where}{error.strerror or error}"
    return SurgeryError(what, untouched=untouched, next=remedy)


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
        return _two_commands(words, known) or _unexpected(error.words, words, path, help)
    if isinstance(error, NoSuchCommand):
        near = _command(error.name, error.known, words)
        return UsageError(f"no such command {error.name!r}", next=near or help)
    if hasattr(error, "possibilities"):  # Click's NoSuchOption, which is public in no package
        return _no_option(error, words, path, help)
    what = error.format_message().rstrip(".")
    hints = [help]
    lacking: Any = getattr(error, "param", None)
    if type(error).__name__ == "MissingParameter" and lacking.param_type_name == "option":
        given = shell(["ckptsurgeon", *words, lacking.opts[0], lacking.metavar])
        hints.insert(0, given)
    return UsageError(what[:1].lower() + what[1:], next=hints)


def _two_commands(words: Sequence[str], known: Collection[str]) -> UsageError | None:
    """What to say of two commands in one line; None where `words` name one."""
    first, *others = [i for i, word in enumerate(words) if word in known] or [0]
    if not others:
        return None
    return UsageError(
        f"two commands in one line: {words[first]} and {words[others[0]]}",
        next=[
            shell(["ckptsurgeon", *words[: others[0]]]),
            shell(["ckptsurgeon", *words[:first], *words[others[0] :]]),
        ],
    )


def _unexpected(extra: Sequence[str], words: Sequence[str], path: str, help: Hint) -> UsageError:
    """What to say of words that the command at `path` does not take."""
    from ckptsurgeon import disk

    if error := loose_pairs(words):
        return error
    what, folder = " ".join(extra), extra[0]
    with contextlib.suppress(OSError):  # a word that is too long for a name
        if len(extra) == 1 and list(words).count(folder) == 1 and disk.is_folder(Path(folder)):
            at = list(words).index(folder)
            help = shell(["ckptsurgeon", *words[:at], "-C", folder, *words[at + 1 :]])
    if path.endswith(" log") and len(extra) == 1 and folder.isdecimal():
        help = command("diff", "--receipt", folder, why="what this surgery did")
    return UsageError(f"`{path}` takes no argument {what}", next=help)


def loose_pairs(words: Sequence[str]) -> UsageError | None:
    """What to say of each KEY=VALUE among `words` that has no --set before it; None where none is
    there, or the command takes no --set."""
    if "--set" not in words and not TYPED.get().takes("--set"):
        return None
    valued = TYPED.get().spellings
    loose = [word for word, before in zip(words[1:], words, strict=False)
             if PAIR.fullmatch(word) and before != "--set" and not valued(before)]  # fmt: skip
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
    parameters = error.ctx.command.params
    near = _option(error.option_name, error.possibilities or (), parameters, words)
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


def _command(unknown: str, known: Sequence[str], words: Sequence[str]) -> Hint | None:
    """What was typed, with the command that is meant by a word which is none."""
    at = list(words).index(unknown)
    before, after = words[:at], words[at + 1 :]
    if unknown == "help":
        return shell(["ckptsurgeon", *(word for word in after[:1] if word in known), "--help"])
    name, equals, value = unknown.partition("=")
    if name in known and equals:  # set-lr=3e-5
        return shell(["ckptsurgeon", *before, name, value, *after])
    near = [MEANT[unknown]] if unknown in MEANT else _near(unknown, known)
    return shell(["ckptsurgeon", *before, near[0], *after]) if near else None


def _option(
    unknown: str, known: Sequence[str], parameters: Sequence[Any], words: Sequence[str]
) -> Hint | None:
    """What was typed, with the option that is meant by a word which is none; nothing where none is
    near. A value counts as the name of what takes it: --step is meant as the argument STEP, or as
    --to STEP."""
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == unknown), None)
    if at is None:
        return None
    _, equals, value = words[at].partition("=")
    before, after = ["ckptsurgeon", *words[:at]], words[at + 1 :]
    named = {f"--{_metavar(each)}".lower(): each for each in reversed(parameters)}
    meant = named.get(unknown)
    if meant is not None and meant.param_type_name == "argument":
        return shell([*before, *([value] if equals else []), *after])
    near = [meant.opts[0]] if meant is not None else _near(unknown, known)
    if unknown in SOURCES:
        own = {name for each in parameters for name in each.opts}.difference(words)
        is_step = STEP.fullmatch(value if equals else "".join(after[:1]))
        near = [name for name in ("--step", "--to") if name in own and is_step][:1]
    return shell([*before, near[0] + equals + value, *after]) if near else None


def _metavar(parameter: Any) -> str:
    """The word for what an option or an argument takes."""
    return str(parameter.metavar or "").strip("[].")


def _near(unknown: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(unknown, known, n=1, cutoff=0.75)
