"""A run of MLflow's file store becomes two: what leads to a step, and the branch that was left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptsurgeon import disk
from ckptsurgeon.logs import tracked
from ckptsurgeon.logs.mlruns.metric_file import MetricFile
from ckptsurgeon.logs.mlruns.run_folder import CUT, META, NAME, RunFolder
from ckptsurgeon.logs.source import Cut
from ckptsurgeon.logs.tracked import TrackedRun
from ckptsurgeon.plans.edits import AnyChange, Aside, Content, Rewrite, Span, relative
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.log_fields import LOGS
from ckptsurgeon.transaction.home import CUT_FROM

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FAILED = 4
"""The number of that state of a run in `meta.yaml`."""


@frozen
class Parted:
    """A run that is cut, and the id and the name of what its branch becomes."""

    root: Path
    folder: RunFolder
    run: TrackedRun
    cut: Cut
    id: str
    name: str

    @property
    def keep(self) -> bool:
        return self.cut.keep_as is not None

    @property
    def new(self) -> Path:
        """The folder of the branch."""
        return self.folder.path.with_name(self.id)

    def file(self, path: Path) -> str:
        return relative(path, self.root)


def parted(
    parted: Parted, files: Sequence[MetricFile], stays: NDArray[np.bool_]
) -> Iterator[AnyChange]:
    """Its metrics; `stays` has a flag for each line, one file after the other."""
    note = tracked.note(int(stays.sum()), len(stays), parted.run, parted.cut)
    if not stays.any():
        yield from _whole_aside(parted, note)
        return
    at = 0
    for file in files:
        own, name = stays[at : at + len(file)], parted.file(file.path)
        at += len(file)
        time = file.path.stat().st_mtime_ns
        if own.any():
            kept = Content(tuple(file.spans(name, own)), time)
            yield Rewrite(name, LOGS, kept, note)
        else:  # MLflow takes an empty file for a damaged one
            yield Aside(name, LOGS)
        if parted.keep and not own.all():
            inner = file.path.relative_to(parted.folder.path)
            branch = Content(tuple(file.spans(name, ~own)), time)
            yield _new(parted, parted.new / inner, branch)
    if parted.keep:
        yield from _branch(parted)


def _whole_aside(parted: Parted, note: str) -> Iterator[AnyChange]:
    """A run of which nothing stays is the branch itself, or is deleted as MLflow does it."""
    folder = parted.folder
    if not parted.keep:
        end = int(parted.run.ended * 1000)
        meta = {**folder.meta, "lifecycle_stage": "deleted", "deleted_time": end}
        yield Rewrite(parted.file(folder.path / META), LOGS, _yaml(meta), f"{note}; it is deleted")
        return
    meta = {**folder.meta, "run_name": parted.name}
    yield Rewrite(parted.file(folder.path / META), LOGS, _yaml(meta), note)
    for tag, text in ((NAME, parted.name), (CUT, folder.id)):
        path = folder.path / "tags" / tag
        content = Content((text.encode(),))
        yield Rewrite(parted.file(path), LOGS, content, note, new_file=not disk.exists(path))


def _branch(parted: Parted) -> Iterator[AnyChange]:
    """What the run of the branch has beside metrics: parameters and tags of the run, and a folder
    of artifacts of its own, so that whoever deletes it deletes no other's. It began before the run,
    as a trainer that goes on in the newest one takes the one that began last. MLflow reads no run
    without its three folders, and what is empty can't be staged: so none is."""
    folder, meta = parted.folder, parted.folder.meta
    begun, uri = meta.get("start_time"), meta.get("artifact_uri")
    own = {
        "run_id": parted.id,
        "run_name": parted.name,
        "status": FAILED,
        "end_time": meta.get("end_time") or int(parted.run.ended * 1000),
    }
    own |= {"run_uuid": parted.id} if "run_uuid" in meta else {}
    own |= {"start_time": begun - 1} if isinstance(begun, int) else {}
    own |= {"artifact_uri": uri.replace(folder.id, parted.id)} if isinstance(uri, str) else {}
    said = f"the points of {parted.run.name} ({folder.id}) that do not lead to step "
    said += f"{parted.cut.marks.iteration}\n"
    texts = {f"artifacts/{CUT_FROM}": Content((said.encode(),))}
    texts[f"tags/{NAME}"] = Content((parted.name.encode(),))
    texts[f"tags/{CUT}"] = Content((folder.id.encode(),))
    params = folder.files("params")
    copied = {f"params/{key}": path for key, path in params.items()}
    copied |= {f"tags/{key}": path for key, path in folder.files("tags").items()}
    if not params:
        texts[f"params/{CUT}"] = Content((folder.id.encode(),))
    for inner, path in copied.items():
        span = Span(parted.file(path), 0, path.stat().st_size)
        texts.setdefault(inner, Content((span,)))
    texts[META] = _yaml({**meta, **own})  # last: without it MLflow sees no run
    for inner, content in texts.items():
        yield _new(parted, parted.new / inner, content)


def _new(parted: Parted, path: Path, content: Content) -> Rewrite:
    return Rewrite(parted.file(path), LOGS, content, "the cut branch", new_file=True)


def _yaml(meta: dict[str, Any]) -> Content:
    """As MLflow writes it."""
    import yaml

    text: str = yaml.safe_dump(meta, default_flow_style=False, allow_unicode=True)
    return Content((text.encode(),))
