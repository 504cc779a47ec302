"""The x axis of a picture: steps, tokens, samples or hours, of every branch alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from ckptsurgeon.errors import UsageError
from ckptsurgeon.logs.curves import Branch
from ckptsurgeon.logs.signals import LOSS, SAMPLES, TOKENS
from ckptsurgeon.plans.frozen import frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"

KINDS = ("steps", "tokens", "samples", "time")
_SIGNALS = {"tokens": TOKENS, "samples": SAMPLES}


@frozen
class Axis:
    """`kind` is one of KINDS; `zero` is when the run began, for `time`, and `unit` the seconds of
    what it counts in."""

    kind: str
    zero: float = 0.0
    unit: float = 3600.0

    def of(self, branch: Branch, steps: Floats, stem: Branch) -> Floats:
        """The x of these steps of a branch; what it does not say itself, `stem` says, from which it
        was begun. Between two logged steps it is in between, beyond the last as before."""
        import numpy as np

        if self.kind == "steps":
            return np.asarray(steps, float)
        known, values = self._known(branch)
        more, others = self._known(stem)
        if self.kind != "time":
            early = more < (known[0] if len(known) else np.inf)
            known, values = np.append(more[early], known), np.append(others[early], values)
        if len(known) < 2:
            return np.interp(steps, more, others) if len(more) else np.asarray(steps, float)
        slope = (values[-1] - values[0]) / max(1.0, known[-1] - known[0])
        beyond = np.maximum(np.asarray(steps, float) - known[-1], 0.0) * slope
        return np.asarray(np.interp(steps, known, values) + beyond, float)

    def _known(self, branch: Branch) -> tuple[Floats, Floats]:
        import numpy as np

        curve = branch.get(_SIGNALS.get(self.kind, LOSS))
        if curve is None:
            return np.empty(0), np.empty(0)
        if self.kind == "time":
            good = np.isfinite(curve.walls)
            passed = np.maximum.accumulate((curve.walls[good] - self.zero) / self.unit)
            return curve.steps[good].astype(float), passed
        return curve.steps.astype(float), curve.values

    @property
    def label(self) -> str:
        """What stands below it."""
        if self.kind != "time":
            return self.kind
        return f"{'hours' if self.unit == 3600 else 'minutes'} since the run began"


def axis(kind: str, branches: Sequence[Branch]) -> Axis:
    """That of `--x kind`. Raises UsageError where the logs do not say it."""
    import numpy as np

    if kind not in KINDS:
        raise UsageError(f"--x {kind!r} is not known", next=f"one of {' '.join(KINDS)}")
    if kind == "time":
        walls = [branch[LOSS].walls for branch in branches if LOSS in branch]
        known = np.concatenate([wall[np.isfinite(wall)] for wall in walls])
        if len(known):
            short = float(np.ptp(known)) < 2 * 3600
            return Axis(kind, float(known.min()), 60.0 if short else 3600.0)
    elif kind == "steps" or any(_SIGNALS[kind] in branch for branch in branches):
        return Axis(kind)
    raise UsageError(f"the logs do not say the {kind} of a step", next="--x steps")
