"""The only place that creates, writes, renames, truncates or removes anything on disk.

Every mutating call passes `calls.hook` first, and every OSError that leaves here names its path. No
call follows a symbolic link (`names`). Nothing here is durable by itself: data are durable after
`fsync_file`, a name after `fsync_directory` of its directory.
"""

from __future__ import annotations

from ckptsurgeon.disk import calls
from ckptsurgeon.disk.copies import clone, copy_at, copy_each, read_from
from ckptsurgeon.disk.files import (
    created,
    fsync_data,
    fsync_file,
    opened,
    past_the_cache,
    truncate,
    write_at,
    write_each,
    write_new,
)
from ckptsurgeon.disk.held import Held
from ckptsurgeon.disk.names import (
    NO_HARD_LINKS,
    Folders,
    can_not_link,
    fsync_directory,
    link,
    make_directory,
    remove_directory,
    remove_file,
    rename,
    scratch,
    set_times,
    symlink,
)
from ckptsurgeon.disk.owners import copy_mode, copy_rights
from ckptsurgeon.disk.presence import (
    below,
    exists,
    is_file,
    is_folder,
    is_link,
    is_there,
    matching,
    names_in,
    walk,
)

__all__ = [
    "NO_HARD_LINKS",
    "Folders",
    "Held",
    "below",
    "calls",
    "can_not_link",
    "clone",
    "copy_at",
    "copy_each",
    "copy_mode",
    "copy_rights",
    "created",
    "exists",
    "fsync_data",
    "fsync_directory",
    "fsync_file",
    "is_file",
    "is_folder",
    "is_link",
    "is_there",
    "link",
    "make_directory",
    "matching",
    "names_in",
    "opened",
    "past_the_cache",
    "read_from",
    "remove_directory",
    "remove_file",
    "rename",
    "scratch",
    "set_times",
    "symlink",
    "truncate",
    "walk",
    "write_at",
    "write_each",
    "write_new",
]
