"""What a compiler makes of sources, made once: the next run of the tests finds it in `.cache`."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.launch import REPO

MADE, SAID = "made", "said"
KEPT = REPO / ".cache" / "compiled"


def sources_in(folder: Path, kind: str = "*") -> dict[str, bytes]:
    """The files of a folder and below it, or those that match `kind`, by their names from there."""
    files = sorted(path for path in folder.rglob(kind) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def compiled(command: Sequence[str], sources: Mapping[str, bytes], *told: str) -> Path:
    """A folder with what `command -o FILE` makes (MADE) and what it writes to stderr (SAID).

    The command runs where the `sources` lie. What it makes is kept by all that can change it: the
    command, the compiler's version, this machine's architecture, the sources, and what else is
    `told`. Fails with the compiler's words, and then keeps nothing."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(version)
    for text in (*command, platform.machine(), *told):
        digest.update(text.encode() + b"\0")
    for name, source in sorted(sources.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(source).digest())
    folder = KEPT / digest.hexdigest()[:32]
    if folder.is_dir():
        return folder
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as name:
        place, new = Path(name, "sources"), Path(name, "new")
        for below, source in sources.items():
            (place / below).parent.mkdir(parents=True, exist_ok=True)
            (place / below).write_bytes(source)
        new.mkdir()
        whole = [*command, "-o", str(new / MADE)]
        done = subprocess.run(whole, cwd=place, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (new / SAID).write_text(done.stderr, encoding="utf-8")
        new.rename(folder)
    return folder
