"""Which numbers can be meant: what lies outside is refused, in one wording."""

from __future__ import annotations

from ckptsurgeon.plans.frozen import frozen

MAX_COUNT = (1 << 63) - 1
FLOAT32_MAX = 3.4028234663852886e38


@frozen
class Limits:
    """From `least` on or from `above`, up to what is `below`. More than `most` is a slip of the
    keyboard; a whole number is never more than MAX_COUNT."""

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None

    def words(self, noun: str) -> str:
        """`number, at least 0 and below 1`, or the noun alone."""
        said = {"at least": self.least, "above": self.above, "below": self.below}
        bounds = [f"{word} {bound:g}" for word, bound in said.items() if bound is not None]
        return ", ".join([noun, *([" and ".join(bounds)] if bounds else [])])

    def broken(self, name: str, value: float) -> str | None:
        """What to do about a `value` that can't be meant; None if it can be."""
        low = self.least is None or self.least <= value
        over = self.above is None or self.above < value
        if not (low and over and (self.below is None or value < self.below)):
            return f"write {self.words('a whole number' if isinstance(value, int) else 'a number')}"
        most = MAX_COUNT if self.most is None and isinstance(value, int) else self.most
        if most is None or value <= most:
            return None
        shown = f"{most:g}" if isinstance(most, float) else str(most)
        return f"{name} is at most {shown}{_meant(value)}"


def _meant(value: float) -> str:
    """3e5 is what is left of 3e-5 without its minus."""
    digits, _, power = f"{value:e}".partition("e+")
    lost = float(f"{digits}e-{power or 0}")
    return f"; {lost:g}, if a minus was lost" if 1e-8 <= lost <= 1e-2 else ""


ANY = Limits()
RATE = Limits(least=0, most=100.0)
"""Far above what any published run used: SGD on language models has lr 30."""
SHARE = Limits(least=0, below=1)
EPS = Limits(above=0, most=1e6)
"""Fake SGD has eps 100."""
FLOAT32 = Limits(least=0, most=FLOAT32_MAX)
"""What the trainer's numbers can hold."""
COUNT = Limits(least=0)
FURTHER = {"momentum": SHARE, "beta3": SHARE}
"""Of what else the param groups of an optimizer hold, by its name there."""
