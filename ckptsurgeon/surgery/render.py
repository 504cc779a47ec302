"""Changes become edits: one per file, in an order in which a crash or a reader does no harm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import PurePosixPath

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import METADATA
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.hints import shell
from ckptsurgeon.plans.edits import (
    AnyChange,
    Append,
    Aside,
    Change,
    Content,
    Edit,
    Link,
    Move,
    NewName,
    NewText,
    Relink,
    Replace,
    Rewrite,
    Span,
)
from ckptsurgeon.plans.queries import Queries
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.names import refuse_foreign


def render(
    run: Run,
    checkpoint: Checkpoint | None,
    changes: Sequence[AnyChange],
    id: str,
    assumed: AbstractSet[str] = frozenset(),
) -> list[Edit]:
    """The edits of surgery `id`: shards, event files, pointers, and last the checkpoints that
    leave. So the pointers name a step whose shards are done, and only then do others go.
    Changes of shards come from the operations on `checkpoint`; there are none without it.

    Raises SurgeryError for an edit of what lies outside of the run or behind a symbolic link;
    numbers may come from elsewhere, out of the files in `assumed`."""
    shards: dict[str, list[Change]] = {}
    logs: list[Edit] = []
    pointers: list[Edit] = []
    asides: list[Edit] = []
    links: list[Relink] = []
    copies: dict[str, Content] = {}
    queries: dict[str, Queries] = {}
    named: dict[str, str] = {}
    folders: dict[str, str] = {}
    for change in changes:
        if isinstance(change, Aside):
            move = Move(change.file, run.attic(change.file, id))
            (asides if change.field == "checkpoint" else logs).append(move)
        elif isinstance(change, Relink):
            links.append(change)
        elif isinstance(change, Rewrite):
            content = change.content
            if isinstance(content, Queries):
                before = queries.get(change.file)
                queries[change.file] = content if before is None else before.then(content)
            elif change.field == "latest":
                copies[change.file] = content
            else:
                logs.append(rewrite(run, change.file, content, id, new=change.new_file))
        elif isinstance(change, NewName):
            name = str(PurePosixPath(change.file).with_name(str(change.new)))
            if disk.is_folder(run.root / change.file):
                folders[change.file] = name
                continue
            named[change.file] = name
            shards.setdefault(change.file, [])
        elif isinstance(change, NewText):
            text = Content((str(change.new).encode(),))
            pointers.append(rewrite(run, change.file, text, id, new=change.old is None))
        else:
            shards.setdefault(change.file, []).append(change)
    logs += [replaced(run, file, content, id) for file, content in queries.items()]
    rendered = checkpoint.render(shards, run.root) if checkpoint is not None else {}
    asides += [Move(folder, run.attic(folder, id)) for folder in folders]
    as_saved = run.format.copy_names_folder and not folders
    copied = {
        file: _copied(content, {} if as_saved else rendered) for file, content in copies.items()
    }
    beside = _made_beside(run, copies, rendered)
    anew = [edit for pair in folders.items() for edit in _folder(run, *pair, rendered, id)]
    under_new_names = {file: (named[file], rendered.pop(file)) for file in named}
    shards_first = [
        *_shards(run, rendered, id, _renamed(run, under_new_names, id)),
        *_shards(run, {**copied, **beside}, id),
    ]
    edits = [*anew, *shards_first, *logs, *relinked(run, links, id), *pointers, *asides]
    refuse_foreign(run.root, run.logs.named(), edits, "the plan", assumed)
    return edits


def _copied(copy: Content, rendered: Mapping[str, Append | Content]) -> Content:
    """What a pointer that is a copy of a whole shard gets: its bytes as they are `rendered`."""
    (span,) = copy.pieces
    assert isinstance(span, Span)
    edit = rendered.get(span.file, copy)
    return edit.whole() if isinstance(edit, Append) else edit


def _made_beside(
    run: Run, copies: Mapping[str, Content], rendered: Mapping[str, Append | Content]
) -> dict[str, Append | Content]:
    """New files that an edited `.metadata` refers to: its copy in another folder needs them there,
    too. No other file refers to one."""
    pairs = {
        (PurePosixPath(span.file).parent, PurePosixPath(file).parent)
        for file, content in copies.items()
        for span in content.pieces
        if isinstance(span, Span) and PurePosixPath(span.file).name == METADATA
    }
    return {
        (there / PurePosixPath(file).name).as_posix(): content
        for file, content in rendered.items()
        for here, there in sorted(pairs)
        if here != there and PurePosixPath(file).parent == here
        if not disk.exists(run.root / file)
    }


def _renamed(run: Run, shards: Mapping[str, tuple[str, Append | Content]], id: str) -> list[Edit]:
    """Each of these files anew under its new name; then the old ones go to the attic."""
    news = []
    for file, (name, edit) in shards.items():
        content = edit.whole() if isinstance(edit, Append) else edit
        news.append(Move(run.staging(name, id), name, content, like=file))
    return [*news, *(Move(file, run.attic(file, id)) for file in shards)]


def _folder(
    run: Run, folder: str, name: str, rendered: dict[str, Append | Content], id: str
) -> Iterator[Edit]:
    """Each file of a step's folder in one of another name, and what is `rendered` of it, which is
    taken out; the folder itself leaves last. Raises SurgeryError for a symbolic link in it."""
    old = [path for path in sorted(disk.below(run.root / folder)) if not disk.is_folder(path)]
    if link := next((path for path in old if disk.is_link(path)), None):
        raise SurgeryError(
            f"{run.relative(link)} is a symbolic link, and the folder gets another name",
            next=shell(
                ["cp", "--remove-destination", link.resolve(), link], why="a file of its own"
            ),
        )
    files = dict.fromkeys(map(run.relative, old))
    files |= dict.fromkeys(file for file in rendered if file.startswith(f"{folder}/"))
    for file in files:
        edit = rendered.pop(file, None)
        content = edit.whole() if isinstance(edit, Append) else edit
        if content is None:
            content = Content((Span(file, 0, (run.root / file).stat().st_size),))
        new = f"{name}{file.removeprefix(folder)}"
        like = file if disk.exists(run.root / file) else None
        yield Move(run.staging(new, id), new, content, like)


def _shards(
    run: Run,
    rendered: Mapping[str, Append | Content],
    id: str,
    renamed: Sequence[Edit] = (),
) -> list[Edit]:
    """New files first: none names them yet. Then replaced shards before appended ones, which no
    reader accepts until the last one is done (`redo.py`). Where all are replaced, the first makes
    way for an empty file meanwhile, so that a reader of all shards meets an error, never old and
    new ones; those that are `renamed` come meanwhile, too."""
    contents = {file: item for file, item in rendered.items() if isinstance(item, Content)}
    appends = [item for item in rendered.values() if isinstance(item, Append)]
    made = [file for file in contents if not disk.exists(run.root / file)]
    news = [rewrite(run, file, contents.pop(file), id, new=True) for file in made]
    replaces = [replaced(run, file, item, id) for file, item in contents.items()]
    if replaces and len(replaces) + len(renamed) > 1 and not appends:
        first, last = make_unreadable(run, replaces, id)
        return [*news, *first, *renamed, last]
    return [*news, *replaces, *renamed, *appends]


def make_unreadable(
    run: Run, replaces: Sequence[Replace], id: str
) -> tuple[list[Replace], Replace]:
    """The same replacements, with the first file empty until the last one: what comes first, and
    that last one."""
    mark = f"{replaces[0].file}.empty"
    empty = replace(replaces[0], staged=run.staging(mark, id), content=Content(()))
    return [empty, *replaces[1:]], replace(replaces[0], kept=run.attic(mark, id))


def relinked(run: Run, links: Sequence[Relink], id: str) -> list[Replace]:
    """Each link as a new one. Of several, which the ranks follow side by side, the first makes way
    for an empty file meanwhile: no reader of all goes to two steps."""
    news = [replaced(run, link.file, Link(link.new), id) for link in links]
    if len(news) < 2:
        return news
    first, last = make_unreadable(run, news, id)
    return [*first, last]


def rewrite(run: Run, file: str, content: Content, id: str, *, new: bool) -> Edit:
    """`file` gets `content`; what it was goes to the attic, unless it is a new one."""
    return Move(run.staging(file, id), file, content) if new else replaced(run, file, content, id)


def replaced(run: Run, file: str, content: Content | Link | Queries, id: str) -> Replace:
    """`file` gets `content`; what it was goes to the attic."""
    return Replace(file, run.staging(file, id), run.attic(file, id), content)


def touched(edits: Sequence[Edit]) -> list[str]:
    """The files that must still be what they were: edited, moved away, or about to be made."""
    files = []
    for edit in edits:
        if isinstance(edit, Move):
            files.append(edit.dst if edit.content is not None else edit.src)
        else:
            files.append(edit.file)
    return files
