"""Spikes: where the curves left their course, which one first, and whether the loss came back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptsurgeon.logs.curves import Branch, Curve
from ckptsurgeon.logs.signals import GRAD_NORM, LOSS
from ckptsurgeon.look.advise.rules import RULES, cusum, noise

PATIENCE = 100
"""Steps within which the loss must be back, or the spike is malignant: as far as PaLM went back."""
LEAD = 5
"""Points by which another signal may move before the loss and still belong to the same spike."""
SETTLED = 11
"""Points whose median must be back: one low batch is no recovery."""
WINDOW = {"olmo2": 1000}
"""Points before a spike that say what the level was; 128 for the other rules."""
AUTO = ("olmo2", "olmo-core", "loss-scale", "cusum", "nan")


@dataclass(frozen=True)
class Sign:
    """A point at which a rule says that a signal left its course. `seen` is the step from which on
    it could be told, later than that for a slow rise."""

    signal: str
    step: int
    rule: str
    seen: int


@dataclass(frozen=True)
class Spike:
    """From the step `first`, at which `signal` moved by `rule`, to `last`, at which the loss was
    back, or None. `level` is what the loss was before, `peak` its highest value.

    `slow` is a rise that no rule for spikes sees.
    `malignant` means that it was not back within PATIENCE; None: the log ends before that can be
    told. `signs` are those of all signals, in order. After a `shift` the loss falls again from a
    new level: other data would look like this."""

    first: int
    last: int | None
    signal: str
    rule: str
    malignant: bool | None
    signs: tuple[Sign, ...]
    level: float | None = None
    peak: float | None = None
    shift: bool = False
    slow: bool = False


def needed(rule: str | None) -> int:
    """How many points of the loss a rule must have seen before it says anything."""
    return {"olmo2": 1001, "zclip": 26, "nan": 1, "loss-scale": 2, "cusum": 101}.get(
        rule or "", 129
    )


def find(branch: Branch, rule: str | None = None) -> list[Spike]:
    """All spikes in these curves, oldest first, by one rule or by all of AUTO.

    By itself OLMo 2's rule judges what has 1,000 points before it, and OLMo-core's what has not."""
    signs = _signs(branch, (rule,) if rule else AUTO)
    curve = branch[LOSS]
    own = [sign for sign in signs if sign.signal == LOSS]
    judged = _of_loss(curve, [sign for sign in own if sign.rule != "cusum"], branch)
    slow = _of_loss(curve, [sign for sign in own if sign.rule == "cusum"], branch)
    judged = _either(judged, slow)
    others = [sign for sign in signs if sign.signal != LOSS]
    spikes = [_with(spike, others, curve) for spike in judged]
    taken = {sign for spike in spikes for sign in spike.signs}
    inside = [(s.first, curve.steps[-1] if s.last is None else s.last) for s in spikes]
    alone = [
        sign for sign in others
        if sign not in taken and not any(a <= sign.step <= b for a, b in inside)
    ]  # fmt: skip
    spikes += [_alone(group) for group in _grouped(alone, branch)]
    return sorted(spikes, key=lambda spike: spike.first)


# --- signs ---------------------------------------------------------------------------------------


def _signs(branch: Branch, rules: Sequence[str]) -> list[Sign]:
    import numpy as np

    out: list[Sign] = []
    for name in rules:
        for signal in RULES[name].signals:
            curve = branch.get(signal)
            if curve is None:
                continue
            finite = np.isfinite(curve.values)
            steps, values = curve.steps[finite], curve.values[finite]
            judge = RULES[name].judge
            if name == "nan":
                found = curve.steps[~finite] if signal == LOSS else curve.steps[:0]
            elif name == "cusum":
                out += [Sign(signal, int(steps[a]), name, int(steps[b])) for a, b in cusum(values)]
                continue
            else:
                assert judge is not None
                flags = judge(steps, values)
                if name == "olmo-core" and "olmo2" in rules:
                    flags[1000:] = False
                found = steps[flags]
            out += [Sign(signal, step, name, step) for step in found.tolist()]
    return sorted(out, key=lambda sign: sign.step)


# --- the loss ------------------------------------------------------------------------------------


def _of_loss(curve: Curve, signs: Sequence[Sign], branch: Branch) -> list[Spike]:
    import numpy as np

    values = np.where(np.isfinite(curve.values), curve.values, np.inf)
    medians = _ahead(values)
    spikes: list[Spike] = []
    end = -1
    for sign in signs:
        k, seen = np.searchsorted(curve.steps, [sign.step, sign.seen]).tolist()
        if k <= end:
            continue
        before = values[:k][np.isfinite(values[:k])]
        if sign.rule == "cusum":
            best = float(_means(before).min(initial=np.inf))
            usual: float | None = best
            bound, ahead = best + noise(before) / 2, np.append(_means(values), [np.inf] * 49)
        else:
            last = before[-WINDOW.get(sign.rule, 128) :]
            usual = float(last.mean()) if len(last) else None
            bound = np.inf if usual is None else usual + 2 * float(last.std())
            ahead = np.maximum(medians, values)  # back at a point that is good itself
        good = np.flatnonzero((ahead[seen + 1 :] <= bound) & np.isfinite(ahead[seen + 1 :]))
        back = seen + 1 + int(good[0]) if len(good) else None
        malignant = _malignant(curve.steps, seen, back, values)
        if sign.rule == "cusum" and malignant is not True:
            continue  # a swell that went back is no spike
        end = len(values) if back is None else back
        after = values[k:end]
        peak = float(after[np.isfinite(after)].max(initial=-np.inf))
        spikes.append(
            Spike(
                sign.step,
                None if back is None else int(curve.steps[back]),
                LOSS,
                sign.rule,
                malignant,
                (sign,),
                usual,
                peak if np.isfinite(peak) else None,
                slow=sign.rule == "cusum",
            )
        )
        if back is None and usual is not None and _shifted(values, k, usual, branch):
            spikes[-1] = replace(spikes[-1], malignant=False, shift=True)
    return spikes


def _means(values: Any) -> Any:
    """The mean of each point and the 49 after it."""
    import numpy as np

    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[50:] - sums[:-50]) / 50


def _either(sharp: Sequence[Spike], slow: Sequence[Spike]) -> list[Spike]:
    """Of a slow rise and a spike that is not back, in one time, the spike: it says better when it
    began. Spikes that are back are part of the rise around them."""

    def has(spike: Spike, rise: Spike) -> bool:
        ends = rise.first if spike.last is None else spike.last
        return ends >= rise.first and spike.first <= rise.signs[0].seen + PATIENCE

    known = [spike for spike in sharp if spike.malignant or spike.shift]
    rises = [rise for rise in slow if not any(has(spike, rise) for spike in known)]
    apart = [
        spike for spike in sharp
        if not any(rise.first <= spike.first and rise.last is None for rise in rises)
    ]  # fmt: skip
    return [*apart, *rises]


def _ahead(values: Any) -> Any:
    """The median of each point and the SETTLED - 1 after it; Inf where so many do not follow."""
    import numpy as np

    out = np.full(len(values), np.inf)
    if len(values) >= SETTLED:
        windows = np.lib.stride_tricks.sliding_window_view(values, SETTLED)
        out[: len(windows)] = np.median(windows, axis=1)
    return out


def _malignant(steps: Any, k: int, back: int | None, values: Any) -> bool | None:
    """None: the log ends before the loss had PATIENCE to come back. A loss that is no number at
    the end, three times or more, does not come back."""
    import numpy as np

    if back is not None:
        return bool(steps[back] - steps[k] > PATIENCE)
    if steps[-1] - steps[k] >= PATIENCE and len(steps) - k > SETTLED:
        return True
    return True if len(values) - k >= 3 and not np.isfinite(values[-3:]).any() else None


def _shifted(values: Any, k: int, usual: float, branch: Branch) -> bool:
    """Whether the loss jumped at once to a level below where the run began, and has fallen since
    with a gradient norm as before. A model that breaks takes some updates to it, or goes higher."""
    import numpy as np

    after = values[k:]
    if len(after) < 4 * SETTLED or not np.isfinite(after).all():
        return False
    peak = float(after.max())
    at_once = float(after[:3].max()) - usual >= 0.5 * (peak - usual)
    part = len(after) // 4
    sigma = noise(after)
    fell = float(after[:part].mean() - after[-part:].mean())
    falls = fell > 4 * sigma / part**0.5
    begun = float(values[:3].mean())
    return at_once and falls and peak < begun and _calm(branch, k)


def _calm(branch: Branch, k: int) -> bool:
    """Whether the gradient norm is at most twice what it was before point k of the loss."""
    import numpy as np

    norm = branch.get(GRAD_NORM)
    if norm is None:
        return True
    border = int(np.searchsorted(norm.steps, branch[LOSS].steps[k]))
    before, after = norm.values[max(0, border - 128) : border], norm.values[border + SETTLED :]
    if not len(before) or not len(after):
        return True
    return bool(np.median(after) <= 2 * np.median(before))


# --- the other signals ---------------------------------------------------------------------------


def _with(spike: Spike, others: Sequence[Sign], curve: Curve) -> Spike:
    """The spike with what other signals did shortly before it and while it lasted."""
    import numpy as np

    first = spike.first
    chain: list[Sign] = []
    for sign in reversed([sign for sign in others if sign.step < spike.first]):
        gap = np.searchsorted(curve.steps, first) - np.searchsorted(curve.steps, sign.step)
        if gap > LEAD:
            break
        first = sign.step
        chain.append(sign)
    until = curve.steps[-1] if spike.last is None else spike.last
    later = [sign for sign in others if spike.first <= sign.step <= until]
    firsts: Mapping[str, Sign] = {}
    for sign in sorted([*chain, *spike.signs, *later], key=lambda sign: sign.step):
        firsts = {**firsts, sign.signal: firsts.get(sign.signal, sign)}
    signs = tuple(firsts.values())
    lead = min(signs, key=lambda sign: (sign.step, sign.signal != LOSS))
    return replace(spike, first=lead.step, signal=lead.signal, rule=lead.rule, signs=signs)


def _grouped(signs: Sequence[Sign], branch: Branch) -> list[list[Sign]]:
    """Signs of one signal that follow each other within PATIENCE steps."""
    groups: dict[str, list[list[Sign]]] = {}
    for sign in signs:
        own = groups.setdefault(sign.signal, [])
        if own and sign.step - own[-1][-1].step <= PATIENCE:
            own[-1].append(sign)
        else:
            own.append([sign])
    return [group for own in groups.values() for group in own]


def _alone(group: Sequence[Sign]) -> Spike:
    """A spike that the loss did not follow."""
    first, last = group[0], group[-1]
    return Spike(first.step, last.step, first.signal, first.rule, False, (first,))
