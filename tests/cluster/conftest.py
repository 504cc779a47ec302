"""A Dask scheduler, and a real SLURM of two nodes: Debian's `slurm-wlm` and `munge`, as root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.dask_workers import Dask
from tests.support.launch import ON_CPU, REPO

LONG_S = 900
"""Seconds in which what a test waits for comes on any machine."""
IDLE = ("sinfo", "-h", "-t", "idle", "-o", "%D")
"""How many nodes are."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
CONF = """\
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
KillWait=5
MpiDefault=none
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=zz2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Jobs of a SLURM whose commands read `environment`."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def __call__(self, *words: object) -> str:
        """What one of its commands prints."""
        done = subprocess.run(
            list(map(str, words)), env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def answers(self, *words: object) -> str:
        """The same; empty where it fails."""
        with suppress(AssertionError):
            return self(*words)
        return ""

    def submit(self, script: Path) -> str:
        """The number of the job."""
        return self("sbatch", "--parsable", script).strip()

    def shows(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self("scontrol", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)

    def ends(self, job: str) -> dict[str, str]:
        """The same once the job has ended, however long that takes while it goes on saying
        something."""
        state, size, since = "", -1, time.monotonic()
        while time.monotonic() - since < LONG_S:
            shown = self.shows(job)
            if shown["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"):
                return shown
            said = Path(shown["StdOut"])
            before = state, size
            state, size = shown["JobState"], said.stat().st_size if said.exists() else 0
            if (state, size) != before:
                since = time.monotonic()
            time.sleep(0.5)
        raise AssertionError(f"job {job}: {state}, and silent for {LONG_S} s")


def until(found: Callable[[], object], said: Path | None = None) -> None:
    """Wait for something. It fails with what is `said`."""
    end = time.monotonic() + LONG_S
    while not found():
        if time.monotonic() > end:
            text = said.read_text() if said is not None and said.exists() else "nothing was said"
            raise AssertionError(f"it did not come: {text}")
        time.sleep(0.05)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its two nodes are idle; nothing of it is left after the tests."""
    path = os.pathsep.join(["/usr/sbin", os.environ["PATH"]])
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"no SLURM for root here: {', '.join(missing) or 'not root'}")
    folder = tmp_path_factory.mktemp("slurm")
    for above in (folder, *folder.parents):
        if above.stat().st_uid == 0 and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o055)  # munge trusts only such folders
            if above == Path("/tmp"):
                break
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    host = socket.gethostname()
    conf.write_text(CONF.format(host=host, folder=folder, ports=_free_ports(3)))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    environment = {
        **os.environ, **ON_CPU, "PATH": path, "SLURM_CONF": str(conf),
        "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    munge = [
        "munged", "--foreground", "--force", f"--key-file={key}",
        f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
    ]  # fmt: skip
    made = Cluster(environment)
    node = ["slurmd", "-D", "-N"]
    commands: list[tuple[list[str], Callable[[], bool]]] = [
        (munge, (folder / "munge.socket").exists),
        (["slurmctld", "-D"], lambda: made.answers("scontrol", "ping") != ""),
        ([*node, host], lambda: True),
        ([*node, "zz2"], lambda: made.answers(*IDLE).strip() == "2"),
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for words, works in commands:
            with (folder / f"{len(started)}.out").open("w") as out:
                started.append(subprocess.Popen(words, env=environment, stdout=out, stderr=out))
            _until_it_works(works, started[-1], folder)
        yield made
        with suppress(AssertionError):
            made("scancel", "--user=root")
            until(lambda: not made("squeue", "-h"))
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(LONG_S)


def _until_it_works(
    works: Callable[[], bool], process: subprocess.Popen[bytes], folder: Path
) -> None:
    until(lambda: works() or process.poll() is not None)
    logs = [*folder.glob("*.log"), *folder.glob("*.out")]
    assert process.poll() is None, {path.name: path.read_text()[-500:] for path in logs}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Callable[..., str]:
    """`job(root, "--nodes", 2)`: the number of the job whose script `relaunch --slurm` writes."""

    def submit(root: Path, *words: object) -> str:
        script = tmp_path / "job.sbatch"
        script.unlink(missing_ok=True)
        command = [sys.executable, "-m", "ckptsurgeon", "relaunch", "-C", root, "--slurm"]
        output = f"output={tmp_path}/job.out"
        more = ["--sbatch", output, "--sbatch", "overcommit", "-o", script]
        subprocess.run(
            list(map(str, [*command, *more, *words])),
            check=True,
            cwd=tmp_path,
            env=cluster.environment,
        )
        return cluster.submit(script)

    return submit


@pytest.fixture
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dask]:
    """A scheduler without a worker."""
    pytest.importorskip("distributed")
    made = Dask(tmp_path_factory.mktemp("dask"))
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
