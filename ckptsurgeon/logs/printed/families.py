"""Which trainers' words may be met in a run of a format, and the statements in printed lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptsurgeon.logs.printed import (
    bundled,
    composer,
    deepspeed,
    fairseq2,
    lightning,
    megatron,
    metaseq,
    mmengine,
    nanotron,
    olmo_core,
    open_clip,
    own_loop,
    torchtitan,
    transformers,
    verl,
)
from ckptsurgeon.logs.printed.stated import LoggedUpdate


@dataclass(frozen=True, eq=False)
class Family:
    """How one trainer speaks: `read` takes a printed line, `points` and `prefixes` say what a
    TensorBoard tag means, whose steps are `late` behind the update that they tell of. Lines that
    name updates by epochs alone are `numbered` together, where nothing else says their numbers."""

    name: str
    read: Callable[[str], LoggedUpdate | None]
    points: Mapping[str, str]
    prefixes: Mapping[str, str] | None = None
    late: int = 0
    numbered: Callable[[Sequence[LoggedUpdate]], Iterator[LoggedUpdate]] | None = None


MEGATRON = Family(megatron.NAME, megatron.read, megatron.POINTS)
BUNDLED = Family(bundled.NAME, bundled.read, bundled.POINTS)
DEEPSPEED = Family(deepspeed.NAME, deepspeed.read, deepspeed.POINTS)
TORCHTITAN = Family(torchtitan.NAME, torchtitan.read, torchtitan.POINTS, torchtitan.PREFIXES)
OLMO_CORE = Family(olmo_core.NAME, olmo_core.read, olmo_core.POINTS)
NANOTRON = Family(nanotron.NAME, nanotron.read, nanotron.POINTS)
METASEQ = Family(metaseq.NAME, metaseq.read, metaseq.POINTS)
TRANSFORMERS = Family(transformers.NAME, transformers.read, transformers.POINTS)
LIGHTNING = Family(
    lightning.NAME, lambda _: None, lightning.POINTS, lightning.PREFIXES, lightning.LATE
)
VERL = Family(verl.NAME, verl.read, verl.POINTS)
FAIRSEQ2 = Family(fairseq2.NAME, fairseq2.read, fairseq2.POINTS, fairseq2.PREFIXES)
OPEN_CLIP = Family(
    open_clip.NAME,
    open_clip.read,
    open_clip.POINTS,
    late=open_clip.LATE,
    numbered=open_clip.numbered,
)
MMENGINE = Family(mmengine.NAME, mmengine.read, mmengine.POINTS)
OWN = Family(own_loop.NAME, own_loop.read, own_loop.POINTS)
"""Heard where no other one says anything: its names are those that anybody may use."""
COMPOSER = Family(composer.NAME, composer.read, composer.POINTS, composer.PREFIXES, composer.LATE)
FAMILIES: Mapping[str, Sequence[Family]] = {
    "deepspeed": (MEGATRON, TRANSFORMERS, DEEPSPEED),
    "megatron": (MEGATRON,),
    "torchtitan": (TORCHTITAN,),
    "olmo-core": (OLMO_CORE,),
    "fairseq": (METASEQ,),
    "transformers": (TRANSFORMERS, DEEPSPEED),
    "accelerate": (TRANSFORMERS, DEEPSPEED),
    "nanotron": (NANOTRON,),
    "lightning": (LIGHTNING, DEEPSPEED),
    "verl": (VERL,),
    "fairseq2": (FAIRSEQ2,),
    "open-clip": (OPEN_CLIP,),
    "composer": (COMPOSER,),
    "composer-sharded": (COMPOSER,),
    "mmengine": (MMENGINE,),
    "mmengine-epochs": (MMENGINE,),
}
"""Format → who may have saved it; the first one that reads a line has it."""


def families(format: str, own: bool = False) -> Sequence[Family]:
    """The families of a format, of a page's all; `own` is a run of the bundled trainer."""
    return (BUNDLED,) if own else FAMILIES.get(format) or every()


def every() -> Sequence[Family]:
    """All families, for a file that no run is known of: their lines are told apart by their form.
    Megatron's is also the bundled trainer's."""
    return list(dict.fromkeys(speaker for item in FAMILIES.values() for speaker in item))


class Listener:
    """Reads printed lines one by one."""

    def __init__(self, speakers: Sequence[Family]) -> None:
        self._speakers = speakers
        self._begun: LoggedUpdate | None = None

    def feed(self, line: str) -> list[LoggedUpdate]:
        """The statements that `line` completes: one that is spread over lines may wait for more,
        with lines between that say nothing here."""
        statement = next((s for item in self._speakers if (s := item.read(line)) is not None), None)
        if statement is None or (statement.continues and statement.some_lr is None):
            return []  # a word is of rates: of what was measured, curves are made (logs/rows.py)
        begun, self._begun = self._begun, None
        if statement.continues:
            return [] if begun is None else [begun.joined(statement)]
        done = [] if begun is None else [begun]
        if statement.begins:
            self._begun = statement
            return done
        return [*done, statement]

    def end(self) -> list[LoggedUpdate]:
        """The statement that no later line completed."""
        begun, self._begun = self._begun, None
        return [] if begun is None else [begun]
