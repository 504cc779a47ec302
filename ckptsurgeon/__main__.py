"""`ckptsurgeon`, and `python -m ckptsurgeon` for where the script is not on the path."""

from __future__ import annotations

import gc


def main() -> None:
    """Run the command line, with few collections: loading modules makes a hundred thousand objects
    and no garbage, and looking for some took a tenth of a start."""
    gc.set_threshold(100_000, 20, 20)
    from ckptsurgeon.cli import main

    main()


if __name__ == "__main__":
    main()
