"""What is unusual in a checkpoint's tensors: said, never judged, the most unusual first.

The usual ranges are those of published runs, named beside each; docs/vitals.md has the sources.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from ckptsurgeon.errors import share
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.look.vitals.reading import Numbers, Reading
from ckptsurgeon.plans.frozen import frozen

AGREEING = 0.6
"""An update RMS above it: most gradients of the tensor agree in sign."""
USUAL = (0.2, 0.4)
YOUNG = 5
"""Times 1 / (1-b1): the updates after which a mean has forgotten that it began at 0."""
FAINT = 0.5
"""A share of elements whose sqrt(v) is under 10 eps, from which eps dominates their updates."""
BLANK = 0.01
"""A share of elements whose exp_avg is exactly 0 after an update, which hardly happens."""
DENORMAL = 0.01
LARGE = 1e4
GAIN = (0.01, 100.0)
UNLIKE = 0.1
"""A rank correlation of |m| with v below it: they look as if they were of different tensors."""
STARVED = 0.01
"""An expert whose root mean v is under this share of the median of its layer."""
NORM = re.compile(r"(norm|(^|[._])ln(_\w+)?)([._]\d+)?\.weight$", re.IGNORECASE)
EXPERT = re.compile(r"experts?[._](?:\w+[._])*?(\d+)(?=[._]|$)")


@frozen
class Observation:
    """One sentence about one parameter; `weight` orders them, 1 is at the edge of the usual."""

    parameter: str
    kind: str
    what: str
    weight: float


@frozen
class Sign:
    """The numbers of one parameter over all files; None where they are not kept."""

    parameter: str
    elements: int
    update_rms: float | None
    faint: float | None
    still: float | None
    blank: float | None
    rows: int
    untrained: int
    likeness: float | None
    ratio: float | None
    norms: dict[str, float]
    largest: float | None
    denormal: float | None
    relative_update: float | None
    constant: bool
    young: bool
    low: float | None
    high: float | None


def signs(readings: Iterable[Reading]) -> list[Sign]:
    """One for each parameter, in the order in which they were read."""
    grouped: dict[str, list[Reading]] = {}
    for reading in readings:
        if reading.parameter and reading.job.numel > 1:
            grouped.setdefault(reading.parameter, []).append(reading)
    return [_sign(name, mine) for name, mine in grouped.items()]


def _sign(name: str, mine: Sequence[Reading]) -> Sign:
    pairs = [r.pair for r in mine if r.pair is not None and r.pair.elements]
    moved = sum(p.elements for p in pairs)
    norms = {
        kind: math.sqrt(sum(n.squares for n in found))
        for kind in ("weights", "master", "exp_avg", "exp_avg_sq", "")
        if (found := _numbers(mine, kind))
    }
    if "" in norms:
        norms.setdefault("weights", norms.pop(""))
    held = _numbers(mine, "weights") or _numbers(mine, "") or _numbers(mine, "master")
    count = sum(n.count for n in held)
    updates = math.sqrt(sum(p.updates for p in pairs) / moved) if moved else None
    rms = math.sqrt(sum(n.squares for n in held) / count) if count else 0.0
    rates = [r.job.strip.adam.lr for r in mine if r.job.strip and r.job.strip.adam]
    lr = next((rate for rate in rates if rate is not None), None)
    relative = None if updates is None or lr is None or not rms else lr * updates / rms
    low = min((n.low for n in held), default=None)
    high = max((n.high for n in held), default=None)
    likes = [p.likeness for p in pairs if p.likeness is not None]
    return Sign(
        parameter=name,
        elements=max(moved, count),
        update_rms=updates,
        faint=sum(p.faint for p in pairs) / moved if moved else None,
        still=sum(p.still for p in pairs) / moved if moved else None,
        blank=sum(p.blank for p in pairs) / moved if moved else None,
        rows=sum(p.rows for p in pairs),
        untrained=sum(p.untrained for p in pairs),
        likeness=min(likes, default=None),
        ratio=max((p.ratio for p in pairs), default=None),
        norms=norms,
        largest=max((n.largest for n in held), default=None),
        denormal=sum(n.denormal for n in held) / count if count else None,
        relative_update=relative,
        constant=count > 1 and low == high,
        young=any(_young(r) for r in mine),
        low=low,
        high=high,
    )


def _young(reading: Reading) -> bool:
    """Whether its moments hold so few gradients that noise alone makes an update of size 1."""
    adam = None if reading.job.strip is None else reading.job.strip.adam
    if adam is None or adam.step is None or not adam.betas:
        return False
    return adam.step < YOUNG / (1 - adam.betas[0])


def _numbers(mine: Sequence[Reading], kind: str) -> list[Numbers]:
    return [r.kinds[kind] for r in mine if kind in r.kinds and r.kinds[kind].count]


# --- what helps ---


def advice(kind: str, step: int, against: int | None, older: int | None) -> Hint:
    """What to do next about an observation of a kind at `step`. `against` is the earlier step that
    was looked at beside it, `older` the newest one that could be."""
    loss = command("advise", why="whether the loss suffered from it")
    if kind == "untrained-rows":
        return "nothing, if the data never has these tokens; else check the tokenizer"
    if kind == "starved":
        return "raise the load-balancing loss of the router where the trainer is started"
    if kind == "attention-logits":
        return command("scale", "--qk-clip", "100", "-n", why="which heads it would scale down")
    if kind == "eps":
        return command("show", why="its eps; `set eps=` lowers it")
    if kind in ("untrained", "blank"):
        return command("log", why="whether a surgery reset it; if none did, go back to before it")
    if kind in ("update-rms", "norm-growth") or against is not None:
        return loss
    if older is None:
        return "compare it with the next step that is saved: doctor --vitals --against STEP"
    if kind == "unlike":
        return command("verify", step, "--after", older, why="whether it follows from that step")
    return command("doctor", "--vitals", "--against", older, why="whether it grew since")


# --- what is unusual -----------------------------------------------------------------------------


def observations(found: Sequence[Sign]) -> list[Observation]:
    """Everything unusual, the most unusual first."""
    out = [item for sign in found for item in _of(sign)]
    out += _experts(found)
    return sorted(out, key=lambda item: -item.weight)


def _of(sign: Sign) -> Iterator[Observation]:
    def say(kind: str, what: str, weight: float) -> Observation:
        return Observation(sign.parameter, kind, what, weight)

    if sign.update_rms is not None and sign.update_rms > AGREEING and not sign.young:
        yield say(
            "update-rms",
            f"update RMS {sign.update_rms:.2f}, usual {USUAL[0]:g} to {USUAL[1]:g}: its gradients "
            "agree in sign",
            sign.update_rms / AGREEING,
        )
    if sign.still == 1:
        yield say("untrained", "v is 0 everywhere: never trained, or reset", 2.0)
    elif sign.untrained:
        some = share(sign.untrained, sign.rows, "row", "was", "were")
        yield say(
            "untrained-rows",
            f"{some} never trained (v is 0)",
            1 + sign.untrained / sign.rows,
        )
    if sign.faint is not None and sign.faint > FAINT and sign.still != 1:
        yield say(
            "eps",
            f"√v is under 10 eps in {sign.faint:.0%} of it: eps dominates these updates",
            sign.faint / FAINT,
        )
    if sign.blank is not None and sign.blank > BLANK:
        yield say(
            "blank",
            f"exp_avg is 0 and exp_avg_sq is not in {sign.blank:.0%} of it: reset, or not written",
            1.5 + sign.blank,
        )
    if sign.likeness is not None and sign.likeness < UNLIKE:
        yield say(
            "unlike",
            f"exp_avg looks as if it was of another tensor than exp_avg_sq (rank correlation "
            f"{sign.likeness:.2f})",
            2 - sign.likeness,
        )
    if sign.largest is not None and sign.largest > LARGE:
        yield say("large", f"largest weight {sign.largest:.3g}", sign.largest / LARGE)
    if sign.denormal is not None and sign.denormal > DENORMAL:
        yield say(
            "denormal",
            f"{sign.denormal:.0%} of its weights are denormal",
            1 + sign.denormal,
        )
    if sign.constant and sign.high not in (0.0, 1.0):
        yield say("constant", f"every weight is {sign.high:g}", 1.5)
    if NORM.search(sign.parameter) and sign.low is not None and sign.high is not None:
        if sign.high > GAIN[1] or sign.low < -GAIN[1]:
            yield say("gain", f"norm gain up to {max(sign.high, -sign.low):.3g}", 1.5)
        elif max(abs(sign.low), abs(sign.high)) < GAIN[0]:
            yield say("gain", f"norm gains are all under {GAIN[0]:g}", 1.5)


def _experts(found: Sequence[Sign]) -> Iterator[Observation]:
    """Those whose gradients are far smaller than those of the other experts of their layer."""
    layers: dict[str, list[tuple[float, Sign]]] = {}
    for sign in found:
        if (match := EXPERT.search(sign.parameter)) and "exp_avg_sq" in sign.norms:
            layer = sign.parameter[: match.start(1)] + "*" + sign.parameter[match.end(1) :]
            size = math.sqrt(sign.norms["exp_avg_sq"] / math.sqrt(sign.elements))
            layers.setdefault(layer, []).append((size, sign))
    for members in layers.values():
        sizes = sorted(size for size, _ in members)
        median = sizes[len(sizes) // 2]
        for size, sign in members:
            if len(members) > 1 and size < STARVED * median:
                share = size / median
                yield Observation(
                    sign.parameter,
                    "starved",
                    f"starved expert: its gradients are {share:.2g} of the median of its layer",
                    1.5 + STARVED - share,
                )


def noise_floor(betas: Sequence[float] | None) -> float | None:
    """The update RMS of gradients without any direction: √((1-b1) / (1+b1))."""
    return None if not betas else math.sqrt((1 - betas[0]) / (1 + betas[0]))
