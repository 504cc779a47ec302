"""Spikes: where the curves left their course, which one first, and whether the loss came back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptsurgeon.logs.curves import Branch, Curve
from ckptsurgeon.logs.signals import GRAD_NORM, LOSS
from ckptsurgeon.look.advise.courses import from_nought, swings
from ckptsurgeon.look.advise.rises import LONG, Rise, cusum, onset, scale
from ckptsurgeon.look.advise.rules import Floats, noise
from ckptsurgeon.look.advise.signs import Sign, Spike, signs

PATIENCE = 100
"""Steps within which the loss must be back, or the spike is malignant: as far as PaLM went back."""
LEAD = 5
"""Points by which another signal may move before the loss and still belong to the same spike."""
SETTLED = 11
"""Points whose median must be back: one low batch is no recovery. A log that names a step only now
and then must have so many points of PATIENCE, too."""
WINDOW = {"olmo2": 1000, "early": 32}
"""Points before a spike that say how the loss scattered; 128 for the other rules."""
FALLS = 0.15
"""Share of a jump by which the loss must have fallen again where other data made it."""
LASTING = 0.6
"""Share of a rise that matters which must last: a spike on the crest of a wave of the data is not
back at once."""
NEAR, LATE = 10, 3
"""Points before and after the one at which a rise began by its shape, in which the sign of another
rule dates it."""
AGAIN = 2
"""Points in a row that are good between a spike and the break that follows it at once."""
LEAST = 4 * SETTLED
"""Points of the loss below which nothing is said by all rules together."""
AUTO = ("olmo2", "olmo-core", "early", "loss-scale", "cusum", "nan")


def needed(rule: str | None) -> int:
    """How many points of the loss a rule must have seen before it says anything."""
    own = {"olmo2": 1001, "olmo-core": 129, "zclip": 26, "nan": 1, "loss-scale": 2, "early": 33}
    return own.get(rule or "", LEAST)


def unjudged(rule: str | None) -> int:
    """How many points at the beginning a rule says nothing of, but that they are no number."""
    return 2 * SETTLED if rule in (None, "cusum") else needed(rule) - 1


def find(branch: Branch, rule: str | None = None) -> list[Spike]:
    """All spikes in these curves, oldest first, by one rule or by all of AUTO.

    By itself OLMo 2's rule judges what has 1,000 points before it, and OLMo-core's what has not.
    Of a loss that begins at 0 AUTO takes no rise for a spike: `judge` looks at these."""
    rules = (rule,) if rule else AUTO
    found = signs(branch, rules)
    loss = _Loss(branch)
    own = [sign for sign in found if sign.signal == LOSS]
    grows = rule is None and from_nought(loss.plain)
    rises = loss.rises(own) if "cusum" in rules and not grows else []
    judged = sorted([*rises, *loss.sharp(own, rises)], key=lambda spike: spike.first)
    others = [sign for sign in found if sign.signal != LOSS]
    spikes = [_with(spike, others, loss.curve) for spike in judged]
    taken = {sign for spike in spikes for sign in spike.signs}
    inside = [(led.first, loss.span(it)[1]) for led, it in zip(spikes, judged, strict=True)]
    alone = [
        sign for sign in others
        if sign not in taken and not any(a <= sign.step <= b for a, b in inside)
    ]  # fmt: skip
    spikes += [_alone(group) for group in _grouped(alone, branch)]
    return sorted(spikes, key=lambda spike: spike.first)


# --- the loss ------------------------------------------------------------------------------------


class _Loss:
    """The loss while its spikes are judged: what is not finite counts as higher than any number."""

    def __init__(self, branch: Branch) -> None:
        import numpy as np

        self.branch, self.curve = branch, branch[LOSS]
        self.steps = self.curve.steps
        finite = np.isfinite(self.curve.values)
        self.known = np.flatnonzero(finite)  # the points of `plain`
        self.plain = self.curve.values[finite]
        self.values = np.where(finite, self.curve.values, np.inf)
        self.ahead = _ahead(self.values)
        self.begun = float(np.median(self.plain[:5])) if len(self.plain) else np.inf
        self.size = np.full(len(self.values), np.inf)
        self.size[self.known] = scale(self.plain)[1]

    def rises(self, own: Sequence[Sign]) -> list[Spike]:
        """Rises that matter, dated by the first sign of another rule near to where they began.
        After a shift the level is a new one."""
        out: list[Spike] = []
        base = start = 0
        scales = scale(self.plain)
        while (rise := cusum(self.plain[base:], start - base, scales)) is not None:
            spike, end = self._rise(rise, base, own, scales[1])
            start = max(end, base + rise.seen + 1)
            if spike is not None:
                out.append(spike)
                if spike.shift:
                    base = start = base + max(rise.seen, rise.begin + SETTLED)
                    scales = scale(self.plain[base:], self.begun)
        return swings(out, int(self.steps[-1]), self._top)

    def _rise(
        self, rise: Rise, start: int, own: Sequence[Sign], sizes: Floats
    ) -> tuple[Spike | None, int]:
        """The spike that a rise in `plain` is, and the point at which it ends there; None where it
        never was as high as matters, over SETTLED points. What matters is the least of `sizes`
        while it lasts: the noise of a steep start is not known before it is over."""
        import numpy as np

        began, seen = (int(self.known[start + k]) for k in (rise.begin, rise.seen))
        back = self._back(seen, rise.level + rise.size / 3)
        end = len(self.values) if back is None else back
        high = _highest(self.values[began:end])
        stop = int(np.searchsorted(self.known, end))
        least = min(rise.size, float(sizes[rise.seen : stop - start].min(initial=np.inf)))
        if high < rise.level + least:
            return None, stop
        shape = int(self.known[start + onset(self.plain[start:], rise, high)])
        near = [
            sign for sign in own
            if shape - NEAR <= (k := self._point(sign.step)) <= min(seen, shape + LATE)
            and self.values[k] > rise.level + rise.size / 2
            and np.median(self.values[k : max(k, shape) + 1]) > rise.level + rise.size / 2
        ]  # fmt: skip
        step = int(self.steps[shape])
        sign = Sign(LOSS, step, "cusum", int(self.steps[seen]))
        if near:
            sign = near[0]
        k = self._point(sign.step)
        malignant = self._malignant(seen, back)
        malignant = malignant if self._lasted(began, end, rise.level, least) else False
        shift = self._shifted(k, rise.level)
        if back is None and malignant and not shift:
            sign = replace(sign, step=self._broke(sign, rise.level + rise.size / 3))
        return self._spike(sign, back, False if shift else malignant, shift, slow=not near), stop

    def sharp(self, own: Sequence[Sign], rises: Sequence[Spike]) -> list[Spike]:
        """What the other rules say, apart from the `rises`."""
        import numpy as np

        spans = [self.span(spike) for spike in rises]
        out: list[Spike] = []
        end = -1
        for sign in own:
            k = self._point(sign.step)
            if k <= end or any(a <= sign.step <= b for a, b in spans):
                continue
            before = self.values[:k][np.isfinite(self.values[:k])]
            last = before[-WINDOW.get(sign.rule, 128) :]
            usual = float(before[-LONG:].mean()) if len(before) else None
            bound = np.inf
            if usual is not None:
                bound = max(
                    float(last.mean()) + 2 * float(last.std()), usual + 2 * noise(before[-LONG:])
                )
            back = self._back(k, bound)
            later = [self._point(spike.first) for spike in rises if spike.first > sign.step]
            if later and (back is None or back > later[0]):
                good = np.flatnonzero(self.values[k : later[0]] <= bound)
                back = k + int(good[0]) if len(good) else back  # a spike of its own, just before
            malignant, shift = self._malignant(k, back), False
            end = len(self.values) if back is None else back
            if malignant is not False and usual is not None:
                until = self._point(sign.step + self._patience(k))
                high = float(np.median(self.values[k : min(end, until)])) >= usual + self.size[k]
                high = high and self._lasted(k, end, usual, float(self.size[k]))
                shift = malignant is True and (
                    self._shifted(k, usual) or (not high and back is None)
                )
                malignant = malignant if high and not shift else False
                end = until if shift else end
            if back is None and malignant and not shift:
                sign = replace(sign, step=self._broke(sign, bound))
            out.append(self._spike(sign, back, malignant, shift))
        return out

    def _spike(
        self,
        sign: Sign,
        back: int | None,
        malignant: bool | None,
        shift: bool,
        slow: bool = False,
    ) -> Spike:
        import numpy as np

        k = self._point(sign.step)
        after = self.values[k : len(self.values) if back is None else back]
        peak = float(after[np.isfinite(after)].max(initial=-np.inf))
        broken = np.flatnonzero(np.isinf(after))
        before = self.values[:k][np.isfinite(self.values[:k])][-LONG:]
        level = float(before.mean()) if len(before) else None
        return Spike(
            sign.step, None if back is None else int(self.steps[back]), LOSS, sign.rule, malignant,
            (sign,), level, peak if np.isfinite(peak) else None, shift, slow,
            int(self.steps[k + broken[0]]) if len(broken) else None,
        )  # fmt: skip

    def _top(self, spike: Spike) -> float:
        end = len(self.values) if spike.last is None else self._point(spike.last)
        return _highest(self.values[self._point(spike.first) : end])

    def _broke(self, sign: Sign, bound: float) -> int:
        """The step at which the loss left its course for good, near to the sign: after a spike that
        was over just before, as AGAIN points in a row were good; or where the rise began of which
        a rule for single points has seen a later one."""
        import numpy as np

        k = self._point(sign.step)
        if sign.rule not in ("cusum", "nan"):
            quarter = bound + (self.values[k] - bound) / 4
            while k > 0 and self.values[k - 1] > quarter:
                k -= 1
        good = (self.values[k : k + 2 * SETTLED] <= bound).astype(int)
        over = np.flatnonzero(np.convolve(good, np.ones(AGAIN, int), "valid") == AGAIN)
        if self.values[k] > bound and len(over):
            k += int(over[-1]) + AGAIN
        return int(self.steps[k])

    def _lasted(self, k: int, end: int, level: float, size: float) -> bool:
        """Whether what followed the first SETTLED points was high, too, and half of all points,
        SETTLED or more, were as high as matters; or the log ends there. Two spikes with good points
        between them did not last."""
        import numpy as np

        after = self.values[k + SETTLED : end]
        high = int(np.count_nonzero(self.values[k:end] >= level + size))
        return (
            k + 2 * SETTLED > len(self.values)
            or bool(np.isinf(after).any())
            or (_highest(after) >= level + LASTING * size and high >= max(SETTLED, (end - k) / 2))
        )

    def span(self, spike: Spike) -> tuple[int, int]:
        """The steps in which no other spike of the loss is looked for: until it was back, or, at a
        new level, until that is known."""
        if spike.shift:
            return spike.first, spike.first + self._patience(self._point(spike.first))
        return spike.first, int(self.steps[-1]) if spike.last is None else spike.last

    def _patience(self, k: int) -> int:
        """PATIENCE in steps, SETTLED points or more."""
        beyond = self.steps[min(k + SETTLED, len(self.steps) - 1)]
        return max(PATIENCE, int(beyond - self.steps[k]))

    def _point(self, step: int) -> int:
        import numpy as np

        return int(np.searchsorted(self.steps, step))

    def _back(self, k: int, bound: float) -> int | None:
        """The first point after `k` that is good itself, with the median of those that follow."""
        import numpy as np

        ahead = np.maximum(self.ahead, self.values)[k + 1 :]
        good = np.flatnonzero((ahead <= bound) & np.isfinite(ahead))
        return k + 1 + int(good[0]) if len(good) else None

    def _malignant(self, k: int, back: int | None) -> bool | None:
        """None: the log ends before the loss had PATIENCE to come back. A loss that is no number at
        the end, three times or more, does not come back."""
        import numpy as np

        end = len(self.steps) - 1 if back is None else back
        waited = bool(self.steps[end] - self.steps[k] >= PATIENCE and end - k >= SETTLED)
        if back is not None:
            return waited
        lost = len(self.values) - k >= 3 and bool(np.isinf(self.values[-3:]).all())
        return True if waited or lost else None

    def _shifted(self, k: int, usual: float) -> bool:
        """Whether the loss jumped at once to a level below where the run began, and has fallen
        since, with a gradient norm as before. A model that breaks takes some updates to it, or goes
        higher; without a gradient norm nothing tells the two apart."""
        import numpy as np

        after = self.values[k:]
        if len(after) < 4 * SETTLED or np.isinf(after).any():
            return False
        top, jump = float(np.partition(after, -3)[-3]), float(np.median(after[2:10]))
        at_once = jump - usual >= 0.5 * (top - usual)
        part = len(after) // 4
        fell = float(after[:part].mean() - after[-part:].mean())
        falls = fell > max(4 * noise(after) / part**0.5, FALLS * (top - usual))
        return at_once and falls and top < self.begun and self._calm(k)

    def _calm(self, k: int) -> bool:
        """Whether the gradient norm is at most twice what it was before point k of the loss."""
        import numpy as np

        norm = self.branch.get(GRAD_NORM)
        if norm is None:
            return False
        border = int(np.searchsorted(norm.steps, self.steps[k]))
        before, after = norm.values[max(0, border - 128) : border], norm.values[border + SETTLED :]
        if not len(before) or not len(after):
            return False
        return bool(np.median(after) <= 2 * np.median(before))


def _highest(values: Any) -> float:
    """The highest median of LONG finite points that follow each other, of SETTLED or of 3 where
    these are few."""
    import numpy as np

    values = values[np.isfinite(values)]
    each = next((n for n in (LONG, SETTLED) if len(values) >= 2 * n), 3)
    whole = values[: len(values) // each * each].reshape(-1, each)
    return float(np.median(whole, axis=1).max(initial=-np.inf))


def _ahead(values: Any) -> Any:
    """The median of each point and the SETTLED - 1 after it; Inf where so many do not follow."""
    import numpy as np

    out = np.full(len(values), np.inf)
    if len(values) >= SETTLED:
        windows = np.lib.stride_tricks.sliding_window_view(values, SETTLED)
        out[: len(windows)] = np.median(windows, axis=1)
    return out


# --- the other signals ---------------------------------------------------------------------------


def _with(spike: Spike, others: Sequence[Sign], curve: Curve) -> Spike:
    """The spike with what other signals did shortly before it and while it lasted."""
    import numpy as np

    first = spike.first
    chain: list[Sign] = []
    for sign in reversed([sign for sign in others if sign.step < spike.first]):
        gap = np.searchsorted(curve.steps, first) - np.searchsorted(curve.steps, sign.seen)
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
