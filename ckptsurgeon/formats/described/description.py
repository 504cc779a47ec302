"""One page of YAML that describes a trainer's checkpoints, read strictly.

What a page does not name can't be edited; a key that is not known here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import UsageError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.files.plain_yaml import unknown_key
from ckptsurgeon.formats.described.file_pattern import FilePattern
from ckptsurgeon.formats.described.made_anew import MadeAnew
from ckptsurgeon.formats.described.name_pattern import NUMBER
from ckptsurgeon.plans.edits import Key
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.promise import Caveat
from ckptsurgeon.transaction.home import HOME

KeyPath = tuple[Key, ...]
ANY = "*"
"""In a key path: each item of a list, each value of a dict."""
FILE = "{file}"
"""What stands in the text of a pointer for the name of a file of the step, whatever that is."""
KEY = "{run}/"
"""What the text of a pointer begins with that names a step by its key in a bucket."""
LOADERS = ("dcp", "deepspeed", "megatron")
"""What `loader` may name; without it a pattern is of files that torch.save wrote."""
ANY_FOLDERS = 2
"""Folders of any name above a step: who looks for a run walks through all of them, up to `/`."""
COUNTERS = ("iteration", "consumed_samples", "tokens")
"""What `fields` may name."""
OLDER = "rollback"
RESUME = "resume"
OPTIONS = ("clip_grad", "seed", "optimizer", "skip", "batch_size", "rampup", OLDER, RESUME)
"""What `options` may name: settings that the checkpoint does not decide, a step that was saved
over, and what a start names the step with that it loads."""


@frozen
class Content:
    """What is in the files of one pattern, as key paths: `optimizers` lead to what torch's
    `state_dict()` of an optimizer returned, and so on. `has` must be there. With a `loader` the
    pattern is of folders: of torch.distributed.checkpoint, where a key path is what the names of
    values begin with; of a DeepSpeed engine or of Megatron-core's torch_dist, which know their own
    optimizer: a key path leads into the model files of the one, the common state of the other.

    After the folder of an optimizer another one may have `weights` alone, all where a key path is
    empty: as values, or in safetensors that torch's writer cut into shards."""

    loader: str = ""
    has: tuple[KeyPath, ...] = ()
    optimizers: tuple[KeyPath, ...] = ()
    groups: tuple[KeyPath, ...] = ()
    schedulers: tuple[KeyPath, ...] = ()
    scalers: tuple[KeyPath, ...] = ()
    weights: tuple[KeyPath, ...] = ()
    savers: tuple[KeyPath, ...] = ()
    fields: Mapping[str, tuple[KeyPath, ...]] = field(default_factory=dict)
    optional: bool = False

    @property
    def only_weights(self) -> bool:
        """Whether it is a folder of weights and nothing else."""
        return self.loader == "dcp" and bool(self.weights) and self.paths() == [*self.weights]

    def paths(self) -> list[KeyPath]:
        """All that lead to something that is edited or read."""
        counters = [path for paths in self.fields.values() for path in paths]
        return [
            *self.optimizers, *self.groups, *self.schedulers, *self.scalers, *self.weights,
            *self.savers, *counters,
        ]  # fmt: skip


@frozen
class Within:
    """Where the number of a step is that is a `folder`: under a key path in a `file` inside, or in
    the common state of a folder there that Megatron-core's loader reads."""

    folder: FilePattern
    file: FilePattern


@frozen
class Pointer:
    """A text file that names a step, by its number or by the name of its file. Where it does so
    `by_key`, the text follows the key of the run's folder in its bucket, or its path, and a
    slash."""

    file: str
    text: str
    by_key: bool = False

    def file_in(self, said: str) -> str:
        """What a pointer that says so has for {file}; "" where the rest of its text is another."""
        before, _, after = self.text.strip().partition(FILE)
        said, ends = said.strip(), len(before) + len(after)
        if len(said) <= ends or not (said.startswith(before) and said.endswith(after)):
            return ""
        return said[len(before) : len(said) - len(after)]


@frozen
class Description:
    """One trainer. `number` leads to the step in a file whose name has none, `logged` to what its
    logs count where they do not count steps; `last` are copies of a step, or links to one, and what
    a restart loads; `pointer` is a text file that names a step. Where a step is a folder, `within`
    says which, and in which of its files the number is.

    `witness` names the library whose loader has resumed an edited checkpoint in a test; without it
    every plan says that none was asked. `logs` says by the name of the run's folder where its event
    files are, `log_files` which other files there are logs, and `log_offset` by how much the number
    of a step's last update in the logs is more than that of the step. A file named as a step and
    `unfinished` marks what the trainer does not resume; it is inside of the step where `unfinished`
    begins with a slash. `in_a_bucket` and `in_a_fork` are notes for a run in one. `anew` are
    settings of the param groups that the trainer makes itself at each start."""

    name: str
    files: Mapping[FilePattern, Content]
    source: str = ""
    witness: str = ""
    number: KeyPath = ()
    logged: KeyPath = ()
    within: Within | None = None
    last: tuple[FilePattern, ...] = ()
    pointer: Pointer | None = None
    unfinished: str = ""
    in_a_bucket: str = ""
    in_a_fork: str = ""
    logs: Mapping[str, str] = field(default_factory=dict)
    log_files: tuple[str, ...] = ()
    log_offset: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    anew: Mapping[str, MadeAnew] = field(default_factory=dict)

    @property
    def numbered(self) -> bool:
        """Whether it says which step a file is of; if not, that is called step 0."""
        return bool(self.number) or all("{step}" in pattern.text for pattern in self.files)

    @property
    def counts_epochs(self) -> bool:
        """Whether the number of a step is that of an epoch, by the key that leads to it."""
        return self.number[-1:] in (("epoch",), ("epochs_run",))

    def doubts(self) -> list[str]:
        """What a plan says of a page that does not number its steps, and of one whose loader was
        never asked."""
        out: list[str] = []
        if not self.numbered:
            text = "which step it is, is not known: 0 stands for it, as there is no {step} in PATH"
            out.append(Caveat(text, "step", known=False))
        if self.witness:
            return out
        return [
            *out,
            f"{self.name} is known by its description alone: no loader of it has been asked "
            "which values it takes",
        ]

    @classmethod
    def read(cls, path: Path) -> Description:
        """The page in a file. Raises UsageError with the key that is wrong, OSError."""
        return cls.of(plain_yaml.read(path), str(path))

    @classmethod
    def of(cls, data: Mapping[str, Any], where: str, *, numbered: bool = True) -> Description:
        """The page as plain data; `where` names it in an error. Unless `numbered`, what says no
        step is step 0."""
        page = _Page(where)
        page.known(data, [key for key in cls.__dataclass_fields__ if key != "within"])
        for key in ("name", "files"):
            if not data.get(key):
                raise page.wrong(key, "is missing: a description needs `name` and `files`")
        files = page.mapping(data["files"], "files")
        read = [(text, page.content(item, text)) for text, item in files.items()]
        contents = {page.pattern(text, folder=bool(item.loader)): item for text, item in read}
        number, within = page.number(data["number"], contents) if "number" in data else ((), None)
        page.loaders(contents, within)
        unnumbered = [each.text for each in contents if "{step}" not in each.text]
        if numbered and unnumbered and not number:
            raise page.wrong(
                "files",
                f"has no {{step}} in {unnumbered[0]!r}, and `number` says not where the step is",
            )
        folders = within is not None or any(item.loader for item in contents.values())
        options = page.mapping(data.get("options", {}), "options")
        page.known(options, OPTIONS, "options.")
        return cls(
            name=str(data["name"]),
            files=contents,
            source=str(data.get("source", "")),
            witness=str(data.get("witness", "")),
            number=number,
            logged=page.path(data.get("logged", []), "logged"),
            within=within,
            last=tuple(
                page.pattern(text, folder=folders)
                for text in page.items(data.get("last", []), "last")
            ),
            pointer=page.pointer(data["pointer"], contents) if data.get("pointer") else None,
            unfinished=page.ending(data.get("unfinished", ""), contents, within),
            in_a_bucket=str(data.get("in_a_bucket", "")),
            in_a_fork=str(data.get("in_a_fork", "")),
            logs={k: str(v) for k, v in page.mapping(data.get("logs", {}), "logs").items()},
            log_files=tuple(map(page.below, page.items(data.get("log_files", []), "log_files"))),
            log_offset=page.whole(data.get("log_offset"), "log_offset"),
            options={key: str(text) for key, text in options.items()},
            anew=page.anew(data.get("anew", {}), contents),
        )


@frozen
class _Page:
    """Reads values of a page and names the wrong one."""

    where: str

    def wrong(self, key: str, what: str) -> UsageError:
        return UsageError(
            f"{self.where}: `{key}` {what}", next="see docs/described.md for the keys of a page"
        )

    def known(self, data: Mapping[str, Any], keys: Sequence[str] | Any, inside: str = "") -> None:
        for key in data:
            if key not in keys:
                names = [inside + name for name in keys]
                raise unknown_key(inside + str(key), names, self.where)

    def mapping(self, value: Any, key: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.wrong(key, "is not a mapping")
        return {str(name): item for name, item in value.items()}

    def items(self, value: Any, key: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.wrong(key, "is not a list")
        return value

    def pattern(self, text: Any, key: str = "files", *, folder: bool = False) -> FilePattern:
        parts = str(text).split("/")
        if not all(parts) or ".." in parts or HOME in parts or "\0" in str(text):
            raise self.wrong(key, f"has {text!r}, which is no path inside the run")
        above = takewhile(lambda name: "{step}" not in name, parts[:-1])
        if sum("*" in name or "{" in name for name in above) > ANY_FOLDERS:
            what = f"more than {ANY_FOLDERS} folders of any name above the step"
            raise self.wrong(key, f"has {str(text)[:60]!r}: {what}")
        return FilePattern(str(text), folder)

    def below(self, text: Any) -> str:
        if not isinstance(text, str) or not all(text.split("/")) or ".." in text.split("/"):
            raise self.wrong("log_files", f"has {text!r}, which is no path below the log folder")
        return text

    def whole(self, value: Any, key: str) -> int | None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.wrong(key, "is no whole number")
        return value

    def pointer(self, value: Any, contents: Mapping[FilePattern, Content]) -> Pointer:
        data = self.mapping(value, "pointer")
        if set(data) != {"file", "text"}:
            raise self.wrong("pointer", "has `file` and `text`, with {step} in its text")
        file, text = str(data["file"]), str(data["text"])
        words = set(NUMBER.findall(text.removeprefix(KEY)))
        if not words & {"{step}", FILE}:
            raise self.wrong("pointer.text", "has no {step}, and no {file}")
        if FILE in words and (len(words) > 1 or text.startswith(KEY) or text.count(FILE) > 1):
            raise self.wrong("pointer.text", "has more than {file}, which is all that is written")
        if "*" in text:
            raise self.wrong(
                "pointer.text",
                "has `*`, and a surgery must write all of it: {file} is the name of a file",
            )
        known = NUMBER.findall(next(iter(contents)).text)
        if unknown := sorted(words - {"{step}", FILE, *known}):
            raise self.wrong("pointer.text", f"has {unknown[0]}, and the first of `files` has not")
        self.pattern(file, "pointer.file")
        return Pointer(file, text.removeprefix(KEY), by_key=text.startswith(KEY))

    def ending(
        self, value: Any, contents: Mapping[FilePattern, Content], within: Within | None
    ) -> str:
        """What follows the path of a step in that of the file which marks it."""
        text = value if isinstance(value, str) else "/"
        inside = text.startswith("/")
        name = text[1:] if inside else text
        if "/" in name or (inside and name in ("", ".", "..")):
            raise self.wrong("unfinished", "is no ending of a name, or / and the name of a file")
        files = [each.text for each in contents if not (within or _in_folder(each))]
        if inside and files:
            raise self.wrong("unfinished", f"is inside of a step, and {files[0]!r} is a file")
        return text

    def number(
        self, value: Any, contents: Mapping[FilePattern, Content]
    ) -> tuple[KeyPath, Within | None]:
        if not isinstance(value, Mapping):
            return self.path(value, "number"), None
        data = self.mapping(value, "number")
        if set(data) != {"folder", "file", "keys"}:
            raise self.wrong("number", "is a list of keys, or has `folder`, `file` and `keys`")
        folder = self.pattern(data["folder"], folder=True)
        file = self.pattern(data["file"])
        loaded = [each.text for each, item in contents.items() if item.loader == "megatron"]
        file = replace(file, folder=f"{folder.text}/{file.text}" in loaded)
        return self.path(data["keys"], "number.keys"), Within(folder, file)

    def loaders(self, contents: Mapping[FilePattern, Content], within: Within | None) -> None:
        """Refuse what can't be read together."""
        loaded = [(each, item) for each, item in contents.items() if item.loader]
        for each, item in loaded[1:]:
            if loaded[0][1].loader != "dcp" or not item.only_weights:
                raise self.wrong(
                    f"files.{each.text}",
                    "is a second one with a `loader`: after one of dcp it takes `weights` alone",
                )
        for i, (each, item) in enumerate(loaded):
            if item.has or item.groups or (item.optional and not i):
                what = "has a `loader`, and so no has, groups or optional"
                raise self.wrong(f"files.{each.text}", what)
            if item.loader == "deepspeed" and item.paths() != [*item.schedulers, *item.savers]:
                raise self.wrong(
                    f"files.{each.text}", "is an engine's: it takes schedulers and savers alone"
                )
            if item.loader == "megatron" and (item.optimizers or item.scalers or item.weights):
                raise self.wrong(
                    f"files.{each.text}",
                    "is Megatron-core's: it takes schedulers, savers and fields alone",
                )
        inside = [each.text for each in contents if within and not _below(each, within.folder)]
        if within and inside:
            raise self.wrong(f"files.{inside[0]}", f"is not in the folder {within.folder.text!r}")

    def anew(self, value: Any, contents: Mapping[FilePattern, Content]) -> Mapping[str, MadeAnew]:
        """What the trainer makes itself of an optimizer that is named key by key."""
        given = self.mapping(value, "anew")
        if given and any(item.loader in ("deepspeed", "megatron") for item in contents.values()):
            raise self.wrong("anew", "is of torch's optimizers alone: this loader has its own")
        found: dict[str, MadeAnew] = {}
        for key, said in given.items():
            made = MadeAnew.read(said)
            if made is None:
                raise self.wrong(f"anew.{key}", "is neither a text nor has `of` and `instead`")
            if made.of and any(item.loader for item in contents.values()):
                raise self.wrong(f"anew.{key}", "has an `of`, which is of torch files alone")
            found[key] = made
        return found

    def path(self, value: Any, key: str) -> KeyPath:
        path = self.items(value, key)
        if not all(isinstance(each, (str, int)) and not isinstance(each, bool) for each in path):
            raise self.wrong(key, "is not a list of keys and numbers")
        return tuple(path)

    def paths(self, value: Any, key: str) -> tuple[KeyPath, ...]:
        return tuple(self.path(each, key) for each in self.items(value, key))

    def content(self, value: Any, pattern: str) -> Content:
        data, inside = self.mapping(value, f"files.{pattern}"), f"files.{pattern}."
        self.known(data, Content.__dataclass_fields__, inside)
        fields = self.mapping(data.get("fields", {}), f"{inside}fields")
        self.known(fields, COUNTERS, f"{inside}fields.")
        loader = data.get("loader", "")
        if loader not in ("", *LOADERS):
            raise self.wrong(f"{inside}loader", f"is not one of {', '.join(LOADERS)}")
        optional = data.get("optional", False)
        if not isinstance(optional, bool):
            raise self.wrong(f"{inside}optional", "is neither true nor false")
        return Content(
            loader=loader,
            has=tuple((key,) for key in self.items(data.get("has", []), f"{inside}has")),
            **{
                key: self.paths(data.get(key, []), inside + key)
                for key in ("optimizers", "groups", "schedulers", "scalers", "weights", "savers")
            },
            fields={key: self.paths(item, inside + key) for key, item in fields.items()},
            optional=optional,
        )


def _in_folder(pattern: FilePattern) -> bool:
    """Whether a step of `pattern` is a folder, and not a file."""
    return pattern.folder or "{step}" in pattern.text.rpartition("/")[0]


def _below(pattern: FilePattern, folder: FilePattern) -> bool:
    return pattern.text == folder.text or pattern.text.startswith(f"{folder.text}/")
