"""`ckptsurgeon`, and `python -m ckptsurgeon` for where the script is not on the path."""

from __future__ import annotations

import gc
import sys

STOPPED = """error: stopped by Ctrl-C
untouched: the run is exactly as it was
next: the same command again"""


def main() -> None:
    """Run the command line, with few collections: loading modules makes a hundred thousand objects
    and no garbage, and looking for some took a tenth of a start."""
    gc.set_threshold(100_000, 20, 20)
    try:
        from ckptsurgeon.cli import main
    except KeyboardInterrupt:  # where no class of errors may be loaded yet
        print(STOPPED, file=sys.stderr)
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
