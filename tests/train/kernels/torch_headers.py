"""Fetches the headers of the oldest and the newest torch that the kernels must build with.

Usage: python -m tests.train.kernels.torch_headers [VERSION…]     (`make torch-headers`)

They come from the wheels for macOS: these hold the same headers as those for Linux, in a tenth of
the download. What is there already is not fetched again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.support.launch import REPO
from train.kernels.build import OLDEST_TORCH

FOLDER = REPO / ".cache" / "torch-headers"
OLDEST = ".".join(map(str, (*OLDEST_TORCH, 0)))
NEWEST = "newest"
MACS = [f"--platform=macosx_{version}_0_arm64" for version in (11, 14)]


def headers(version: str) -> Path | None:
    """The include folder of this torch, or None where it has not been fetched."""
    include = FOLDER / version / "torch" / "include"
    return include if include.is_dir() else None


def fetch(version: str) -> None:
    """Download one wheel and keep its headers. Raises CalledProcessError without a network."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = "torch" if version == NEWEST else f"torch=={version}"
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.12"]
        command = [sys.executable, "-m", "pip", *words, *MACS, "--dest", temporary, wanted]
        subprocess.run(command, check=True)
        (wheel,) = Path(temporary).glob("torch-*.whl")
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("torch/include/")]
            archive.extractall(unpacked, names)
        (unpacked / "wheel").write_text(wheel.name + "\n", encoding="utf-8")
        unpacked.rename(FOLDER / version)


def main() -> None:
    for version in sys.argv[1:] or (OLDEST, NEWEST):
        if headers(version) is None:
            fetch(version)
        print((FOLDER / version / "wheel").read_text("utf-8").strip())


if __name__ == "__main__":
    main()
