"""Object stores on this machine: SeaweedFS, and moto's imitation of S3; both listen on loopback."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

KEY, SECRET = "surgeon", "not-so-secret-4711"
DEADLINE_S = 60
FILER = "filer"
"""The port that takes files without a signature, in a file of SeaweedFS's folder."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, nor 10,000 above, where SeaweedFS speaks gRPC; by chance, as
    other workers look for some at the same time."""
    found: list[int] = []
    for port in random.sample(range(12000, 22000), 1000):
        with ExitStack() as stack, suppress(OSError):
            for each in (port, port + 10000):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", each))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no port is free")


@contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """The address of a SeaweedFS that keeps its data in `folder`."""
    master, volume, filer, s3 = free_ports(4)
    actions = ["Admin", "Read", "List", "Write", "Tagging"]
    keys = [{"accessKey": KEY, "secretKey": SECRET}]
    config = {"identities": [{"name": "test", "credentials": keys, "actions": actions}]}
    (folder / "s3.json").write_text(json.dumps(config))
    (folder / FILER).write_text(str(filer))
    words = [
        "weed", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", "-s3",
        f"-s3.port={s3}", f"-s3.config={folder / 's3.json'}", "-volume.max=100",
        "-master.volumeSizeLimitMB=256", "-s3.port.iceberg=0", "-s3.port.lance=0",
    ]  # fmt: skip
    with _started(words, s3, folder / "log") as address:
        yield address


@contextmanager
def moto(folder: Path) -> Iterator[str]:
    """The address of a server of moto."""
    (port,) = free_ports(1)
    with _started(["moto_server", "-H", "127.0.0.1", "-p", str(port)], port, folder / "log") as it:
        yield it


SERVERS = {"seaweedfs": seaweedfs, "moto": moto}


@contextmanager
def _started(words: list[str], port: int, log: Path) -> Iterator[str]:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which(words[0], path=beside)  # OLMo-core's environment has none of its own
    assert program, f"no {words[0]} is installed"
    with log.open("wb") as output:
        process = subprocess.Popen([program, *words[1:]], stdout=output, stderr=output)
        try:
            address = f"http://127.0.0.1:{port}"
            end = time.monotonic() + DEADLINE_S
            while not _answers(address):
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            yield address
        finally:
            process.kill()
            process.wait()


def _answers(address: str) -> bool:
    try:
        client(address).create_bucket(Bucket="bucket")
    except Exception:
        return False
    return True


def client(address: str) -> Any:
    """A client of boto3 for it, as the fixture's environment would make one."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3", endpoint_url=address, region_name="us-east-1", aws_access_key_id=KEY,
        aws_secret_access_key=SECRET, config=Config(connect_timeout=2, read_timeout=30),
    )  # fmt: skip


def upload(store: Any, folder: Path, prefix: str) -> None:
    """As `aws s3 sync` does; each file gets the time of its object."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.upload_file(str(path), "bucket", f"{prefix}/{path.relative_to(folder)}")
    take_times(store, folder, prefix)


def take_times(store: Any, folder: Path, prefix: str) -> None:
    """Each file gets the time of its object."""
    pages = store.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=f"{prefix}/")
    for item in (item for page in pages for item in page["Contents"]):
        moment = int(item["LastModified"].timestamp() * 1_000_000) * 1000
        os.utime(folder / item["Key"][len(prefix) + 1 :], ns=(moment, moment))
