"""What a watch looks for and what it may do: the file that a person wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, ClassVar

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.hints import command, shell
from ckptsurgeon.launch.written import by_others
from ckptsurgeon.operations.fields import Fields, names
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import COUNT, Limits
from ckptsurgeon.plans.frozen import frozen

DIVERGED, NAN, HUNG, COLD, ENDED = "diverged", "nan", "hung", "cold-start", "ended"
CAUSES: Mapping[str, str] = {
    DIVERGED: "the loss diverged, as `advise` says; a loss of NaN is that, too",
    NAN: "the loss is NaN to its end",
    HUNG: "nothing was logged or saved for `hung` minutes",
    COLD: "the first new step does not go on from the one before, as `verify --after` says",
    ENDED: "the trainer ended before its time",
}
ADVISE, APPLY = "advise", "apply"
POSITIVE = Limits(above=0)


@frozen
class Policy(Fields):
    """The keys of `watch:`."""

    key: ClassVar[str] = "watch"

    on: Annotated[list[str], Key("what it looks for", one_of=tuple(CAUSES))] = field(
        default_factory=lambda: list(CAUSES)
    )
    do: Annotated[
        str,
        Key(
            "`advise` writes a recipe and tells a person; `apply` heals the run",
            one_of=(ADVISE, APPLY),
        ),
    ] = ADVISE
    max_surgeries: Annotated[int, Key("with `apply`: surgeries in the whole run", limits=COUNT)] = 2
    min_steps: Annotated[
        int, Key("steps that must lie between two divergences that it treats", limits=COUNT)
    ] = 200
    max_restarts: Annotated[
        int, Key("starts in a row without a new step, after an end or a hang", limits=COUNT)
    ] = 3
    hung: Annotated[float, Key("minutes without a word", limits=POSITIVE)] = 30.0
    every: Annotated[float, Key("seconds between two looks", limits=POSITIVE)] = 30.0
    stop_within: Annotated[
        float, Key("seconds that the trainer has to save and end; then it is killed", limits=COUNT)
    ] = 600.0
    stop: Annotated[
        list[str], Key("the command that stops the trainer, where no kill switch does")
    ] = field(default_factory=list)
    notify: Annotated[list[str], Key("the command that tells a person; JSON is its stdin")] = field(
        default_factory=list
    )

    @property
    def acts(self) -> bool:
        """Whether it may change the run."""
        return self.do == APPLY

    def wants(self, cause: str) -> bool:
        """Whether a cause is looked for."""
        return cause in self.on or (cause == NAN and DIVERGED in self.on)


def load(path: Path) -> Policy:
    """Read a policy. Raises UsageError for what it can't mean, SurgeryError where its commands may
    be those of others."""
    try:
        data = plain_yaml.read(path)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", next=command("watch", "POLICY.yaml", why="another path")
        ) from None
    unknown = [key for key in data if key != Policy.key]
    own = [key for key in unknown if key in names(Policy)]
    if own:
        raise UsageError(
            f"{path}: `{own[0]}` stands outside of `watch`",
            next=f"indent it: watch: {{{own[0]}: {data[own[0]]}}}",
        )
    if unknown:
        raise plain_yaml.unknown_key(unknown[0], [Policy.key], str(path))
    keys = data.get(Policy.key) or {}
    if isinstance(keys, Mapping):  # YAML 1.1 reads the key `on` as true
        keys = {"on" if key is True or key == "True" else key: keys[key] for key in keys}
    policy = Policy.build(keys, str(path))
    policy.check_values()
    if (policy.stop or policy.notify) and (others := by_others(path)):
        raise SurgeryError(
            f"{others}, and it says what to start as you",
            next=shell(["cp", path, "policy.yaml"], why="a copy that is yours, once you read it"),
        )
    return policy
