"""Mounts a folder as a server far away would show it (`slow.c`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("slow.c")
START_S = 20


@dataclass(frozen=True)
class Mount:
    """`there` is what the mount at `here` shows."""

    here: Path
    there: Path

    def __getitem__(self, name: str) -> int:
        return int(os.getxattr(self.here, f"user.{name}"))

    def __setitem__(self, name: str, value: int) -> None:
        os.setxattr(self.here, f"user.{name}", b"%d" % value)

    @contextmanager
    def failing(self, every: int) -> Iterator[None]:
        """Each call of this number fails inside."""
        self["fail"] = every
        try:
            yield
        finally:
            self["fail"] = 0


def lacking() -> str:
    """What is not there of what a mount needs; empty where all of it is."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse may not be opened"
    if missing := [each for each in ("gcc", "pkg-config", "fusermount3") if not shutil.which(each)]:
        return f"{missing[0]} is not installed"
    done = subprocess.run(["pkg-config", "--exists", "fuse3"], check=False)
    return "libfuse3-dev is not installed" if done.returncode else ""


@contextmanager
def mounted(folder: Path) -> Iterator[Mount]:
    """A mount below `folder`, without a delay and without errors yet. Skips the test where no mount
    is allowed, with what libfuse says."""
    program, here, there = folder / "slow", folder / "here", folder / "there"
    here.mkdir()
    there.mkdir()
    words = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], check=True, capture_output=True, text=True
    ).stdout.split()
    strict = ["-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run(["gcc", *strict, "-o", program, SOURCE, *words], check=True)
    said = folder / "stderr"
    with said.open("wb") as stderr:
        server = subprocess.Popen(
            [program, there, here, "-f", "-o", "max_threads=64"], stderr=stderr
        )
    try:
        end = time.monotonic() + START_S
        while not here.is_mount():
            if server.poll() is not None and "not permitted" in said.read_text():
                pytest.skip(f"no mount is allowed here: {said.read_text().strip()}")
            assert server.poll() is None and time.monotonic() < end, said.read_text()
            time.sleep(0.01)
        mount = Mount(here, there)
        mount["delay"] = 0
        yield mount
    finally:
        subprocess.run(["fusermount3", "-u", "-z", here], check=False, stderr=subprocess.DEVNULL)
        server.terminate()
        server.wait()
