"""Which kind of file system a file is on, and how many files are worked on there at once."""

from __future__ import annotations

import os
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = (
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs2", "gpfs", "lustre", "nfs", "nfs4", "ocfs2",
    "panfs", "pvfs2", "smb3", "virtiofs", "wekafs",
)  # fmt: skip
"""Kinds on which a call may be a round trip to a server. `fuse` is most of the others: JuiceFS,
GlusterFS, BeeGFS's and Weka's clients without a module, sshfs. `pvfs2` is OrangeFS."""
LOCAL_THREADS, NETWORK_THREADS = 8, 32


def kind(descriptor: int) -> str:
    """The kind of the mount that an open file is on (proc(5)), of `fuse.sshfs` the first word;
    empty where /proc does not say."""
    try:
        words = Path(f"/proc/self/fdinfo/{descriptor}").read_text("ascii").split()
        mount = words[words.index("mnt_id:") + 1]
        lines = MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
        line = next(line for line in lines if line.startswith(f"{mount} "))
        return line.partition(" - ")[2].split()[0].partition(".")[0]
    except (OSError, ValueError, StopIteration, IndexError):
        return ""


def is_network(folder: Path) -> bool:
    """Whether a server may have what is in the folder, so that other hosts may write there."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return kind(descriptor) in NETWORK
    finally:
        os.close(descriptor)


def threads(folder: Path) -> int:
    """How many files are read, or edited, at once, where nobody says: more on a network's file
    system, so that many wait for their server at the same time."""
    return NETWORK_THREADS if is_network(folder) else LOCAL_THREADS
