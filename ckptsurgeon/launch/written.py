"""Where the command of a trainer is written, and whether others than this user write there."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.run.run import CONFIG, Run
from ckptsurgeon.run.search import SETTINGS
from ckptsurgeon.transaction.worker import user_name


def file(run: Run) -> Path:
    """The file of the run that says how its trainer is started."""
    return run.root / (CONFIG if run.settings.get("relaunch") is None else SETTINGS)


def words(run: Run) -> list[str]:
    """The command that the file names; none for the bundled trainer."""
    own = run.settings.get("relaunch")
    named = own.get("command") if isinstance(own, dict) else None
    return list(map(str, named)) if isinstance(named, list) else []


def command(run: Run) -> str:
    """What that file has started, as far as it is known before a surgery."""
    return shlex.join(words(run)) or f"the bundled trainer with {file(run)}"


def by_others(path: Path) -> str:
    """Who else than this user, and root, can have written the file: a sentence, or nothing. A
    group that may write counts as the user: on many clusters a project shares its folders."""
    for each in dict.fromkeys((path, path.parent, path.resolve(), path.resolve().parent)):
        info = each.stat()
        if info.st_uid not in (0, os.geteuid()):
            return f"{each} belongs to {user_name(info.st_uid)}"
        kept = disk.is_folder(each) and info.st_mode & stat.S_ISVTX  # each keeps what is his there
        if info.st_mode & stat.S_IWOTH and not kept:
            return f"anybody may write to {each}"
    return ""
