"""Archives that lie about what is in them: rows 23 to 32, and what only torch would run."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import struct
import tarfile
from pathlib import Path

import pytest
import torch

from tests.conftest import Trained
from tests.hostile.bad_containers import BAD, poke
from tests.hostile.hostile_run import MODEL, OPTIM, call, refused
from tests.support.snapshot import exact_snapshot


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_with_file_and_byte(trained: Trained, name: str) -> None:
    root = trained()
    shard = root / "global_step8" / OPTIM
    damage, says = BAD[name]
    shard.write_bytes(damage(shard.read_bytes()))
    for words in (["show", 8], ["set", "eps=1e-6"]):
        said = refused(root, *words, offset=True)
        assert OPTIM in said
        assert re.search(says, said), said


def test_another_name_in_the_header_of_a_tensor_is_seen_before_it_is_reset(
    trained: Trained,
) -> None:
    """Row 24: only the headers of records that a command reads are read."""
    root = trained()
    shard = root / "global_step8" / OPTIM
    shard.write_bytes(poke("data/0", ("local", 30, b"X"))(shard.read_bytes()))
    refused(root, "reset", "moments", says="differ", offset=True)


def legacy(shard: Path) -> bytes:
    tree = torch.load(shard, weights_only=False)
    torch.save(tree, shard, _use_new_zipfile_serialization=False)
    return shard.read_bytes()


def test_a_legacy_file_has_exactly_its_length(trained: Trained) -> None:
    """Row 32."""
    root = trained()
    shard = root / "global_step8" / OPTIM
    whole = legacy(shard)
    status, _, said = call("set", "eps=1e-6", "-C", root, "--dry-run")
    assert status == 0, said
    for bad in (whole + bytes(1000), whole[:-1], whole[: len(whole) // 2]):
        shard.write_bytes(bad)
        refused(root, "show", 8, offset=True)
        refused(root, "set", "eps=1e-6", says=OPTIM, offset=True)


def test_code_in_the_header_of_a_legacy_file_is_refused(trained: Trained) -> None:
    """torch reads the four pickles around the object with the plain unpickler."""
    root = trained()
    shard = root / "global_step8" / OPTIM
    whole = legacy(shard)
    code = b"cposix\nsystem\nX\x0c\0\0\0touch CANARY\x85R0"
    shard.write_bytes(whole[:2] + code + whole[2:])
    refused(root, "show", 8, says="a header pickle names posix.system", offset=True)
    assert not Path("CANARY").exists()


def member(name: str, content: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def also_a_tar(whole: bytes) -> bytes:
    """A legacy file whose third pickle, about the system, is a string that makes the file a tar
    archive, too, with the members of torch's oldest format, whose object is {"lr": 666.0}."""
    stream, ends = io.BytesIO(whole), []
    for _ in range(3):
        for _ in pickletools.genops(stream):
            pass
        ends.append(stream.tell())
    info, rest = ends[1], whole[ends[2] :]
    none, number = pickle.dumps([], 2), pickle.dumps(0, 2)
    members = member("storages", number + none) + member("tensors", number)
    members += member("pickle", pickle.dumps({"lr": 666.0}, 2)) + bytes(2 * tarfile.BLOCKSIZE)
    start = info + 7
    head = bytearray(tarfile.TarInfo("x" * 90).tobuf(tarfile.USTAR_FORMAT))
    length = tarfile.BLOCKSIZE + len(members) - start
    head[:start] = whole[:info] + b"\x80\3B" + struct.pack("<I", length)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + members + b"." + rest


@pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter:DeprecationWarning")
def test_a_legacy_file_that_torch_takes_for_a_tar_archive_is_refused(trained: Trained) -> None:
    """torch asks `tarfile` first: it would unpickle what the surgeon has never looked at."""
    root = trained()
    shard = root / "global_step8" / OPTIM
    whole = legacy(shard)
    shard.write_bytes(also_a_tar(whole))
    assert torch.load(shard, weights_only=False) == {"lr": 666.0}
    refused(root, "show", 8, says="for a tar archive", offset=True)
    refused(root, "set", "eps=1e-6", says="for a tar archive", offset=True)


def test_a_damaged_step_does_not_stand_in_the_way_of_a_rollback_to_another(
    trained: Trained,
) -> None:
    root = trained()
    (root / "global_step8" / OPTIM).write_bytes(b"PK\3\4")
    (root / "global_step8" / MODEL).write_bytes(b"")
    before = exact_snapshot(root)
    assert call("rollback", "--to", 6, "-C", root, "--yes")[0] == 0
    assert call("undo", "-C", root, "--yes")[0] == 0
    after = exact_snapshot(root)
    assert {n for n in before if "global_step" in n} <= set(after)
