"""`ckptsurgeon`, and `python -m ckptsurgeon` for where the script is not on the path."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

STOPPED = """error: stopped by Ctrl-C
untouched: the run is exactly as it was
next: the same command again"""
OLDEST = (3, 10)
UNFIT = """error: {}
untouched: the run is exactly as it was
next: {}"""


def refuse_python() -> None:
    """End with three lines where this Python is too old to read the rest."""
    if tuple(sys.version_info[:2]) < OLDEST:
        version = ".".join(map(str, sys.version_info[:3]))
        what = f"ckptsurgeon needs Python 3.10 or newer, and {sys.executable} is {version}"
        print(UNFIT.format(what, "python3.10 -m ckptsurgeon, or a newer one"), file=sys.stderr)
        sys.exit(2)


def lacking(module: str) -> None:
    """End with three lines where a package is not installed that every command needs."""
    source = Path(__file__).resolve().parent.parent
    what = source if (source / "pyproject.toml").is_file() else "ckptsurgeon"
    how = f"{sys.executable} -m pip install {what}, or the Python that has it"
    print(UNFIT.format(f"{sys.executable} has no package {module}", how), file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Run the command line, with few collections: loading modules makes a hundred thousand objects
    and no garbage, and looking for some took a tenth of a start."""
    refuse_python()
    gc.set_threshold(100_000, 20, 20)
    try:
        from ckptsurgeon.cli import main
    except KeyboardInterrupt:  # where no class of errors may be loaded yet
        print(STOPPED, file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "ckptsurgeon":
            raise
        lacking(error.name)
    main()


if __name__ == "__main__":
    main()
