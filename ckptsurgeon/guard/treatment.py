"""What a policy allows to be done about an event: stop, operate, check, start; or ask a person.

Each act is written down when it is done, and finds out by itself whether one before it was: a watch
that is killed at any point is gone on with by the next."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptsurgeon import surgery
from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.guard import event as events
from ckptsurgeon.guard import evidence
from ckptsurgeon.guard.event import ASKED, HEALED, READY, SEEN, STARTED, STOPPED, Event
from ckptsurgeon.guard.policy import COLD, ENDED, HUNG, Policy
from ckptsurgeon.guard.ready import decide
from ckptsurgeon.guard.trainer import OUTPUT, Trainer, clear_switch
from ckptsurgeon.look import soundness
from ckptsurgeon.look.advise.advice import DIVERGED
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from ckptsurgeon.run.writers import FLUSH_S
from ckptsurgeon.transaction.receipts import next_id

if TYPE_CHECKING:
    from ckptsurgeon.logs.curves import Curves

BROKEN = 4
"""The status of `relaunch` where the trainer does not do what was promised."""
WAIT_S = 600.0
"""Seconds for which another surgery may hold the run before the start is given up."""
QUIET_S = FLUSH_S + 10.0
"""Seconds in which logs of a stopped trainer, which another host may have written, are quiet."""
PAUSE_S = 1.0
"""Seconds between two looks at them."""
NEAR = 100
"""Steps within which the same first sign is the same cause."""


class Treatment:
    """Of the run that `open` gives, whose curves `read` gives, by a policy."""

    def __init__(
        self,
        open: Callable[[], Run],
        read: Callable[[Run], Curves],
        policy: Policy,
        say: Callable[[str], None],
        trainer: Trainer,
    ) -> None:
        self._open, self._read, self._policy, self._say = open, read, policy, say
        self._trainer = trainer
        self._failed: set[str] = set()
        self.done: dict[str, Event] = {}
        self._asked: str | None = None  # the surgery that was next then

    def treat(self, event: Event, last: str) -> bool:
        """From where the event stands to the state `last`. False once a person is asked."""
        run = self._open()
        try:
            if event.state == SEEN:
                event = self._stop(run, self.write(run, event))
            if event.state == STOPPED != last:
                event = self._heal(run, event)
            if event.state == HEALED:
                event = self._check(run, event)
            if event.state == READY != last:
                event = self.start(event)
        except (SurgeryError, OSError) as error:
            event = self.ask(run, event, getattr(error, "what", None) or str(error))
        return event.state == last

    def start(self, event: Event) -> Event:
        """The trainer runs from here on, and outlives this process."""
        run = self._open()
        event = self.write(run, event.with_(state=READY))
        event = self._trainer.start(run, event)
        event = self.write(run, event.with_(state=STARTED))
        where = events.folder(run.root, event.id) / OUTPUT
        self._say(f"the trainer starts at step {run.latest()}; it prints to {where}")
        return event

    def advised(self, run: Run, event: Event) -> Event:
        """The event with a recipe for a person, where one is known."""
        try:
            _, chosen = evidence.gather(run, self._read(run), event.id)
        except (SurgeryError, OSError) as error:
            self._say(f"{event.id} no recipe: {error}")
            return event
        return event if chosen is None else event.with_(recipe=chosen.remedy.name)

    def ask(self, run: Run, event: Event, why: str) -> Event:
        """A person is asked, and told once, also where nothing of it can be kept."""
        event = event.with_(state=ASKED, why=why)
        self._asked = next_id(run.root)
        try:
            self.write(run, event)
        except OSError as error:
            self.done[event.id] = event
            self._say(f"{event.id} can't be kept: {error}")
        self._say(f"{event.id} {why}; next: {evidence.next_command(run, event)}")
        return self._tell(run, event)

    def asks(self, run: Run) -> bool:
        """Whether a person was asked, and nobody has operated since."""
        return self._asked == next_id(run.root)

    def tell_again(self, run: Run) -> None:
        """Tell a person what nobody was told yet."""
        for event in events.read(run.root) if self._policy.notify else ():
            if event.state == ASKED and not event.notified:
                self._tell(run, event)

    def _tell(self, run: Run, event: Event) -> Event:
        failed = evidence.notify(run, self._policy, event)
        if failed:
            said = f"{event.id} nobody was told: {failed}"
            if said not in self._failed:
                self._say(said)
            self._failed.add(said)
            return event
        event = replace(event, notified=bool(self._policy.notify))
        with contextlib.suppress(OSError):  # a full disk: it is told once more when it is read
            self.write(run, event)
        return event

    def write(self, run: Run, event: Event) -> Event:
        """Keep the event as it is now."""
        self.done[event.id] = event
        return events.write(run.root, event)

    # --- the acts --------------------------------------------------------------------------------

    def _stop(self, run: Run, event: Event) -> Event:
        why = self._trainer.stop(run, self._policy, event.id, hung=event.cause == HUNG)
        if why:
            return self.ask(run, event, f"the trainer can't be stopped: {why}")
        self._trainer.status()
        return self.write(run, event.with_(state=STOPPED))

    def _heal(self, run: Run, event: Event) -> Event:
        """The surgery, where one helps; it may be done already, or cut off."""
        if run.interrupted():
            surgery.recover(run)
            run = self._open()
        made = _receipt(run, event)
        if made is not None:
            return self.write(run, event.with_(state=HEALED, receipt=made))
        why = _hopeless(event) or beyond(self._policy, events.read(run.root), event)
        if why:
            return self.ask(run, event, why)
        if event.cause in (HUNG, ENDED):
            return self.write(run, event.with_(state=HEALED))
        return self._operate(run, event)

    def _operate(self, run: Run, event: Event) -> Event:
        diagnosis, chosen = evidence.gather(run, self._read(run), event.id)
        if diagnosis.verdict != DIVERGED:
            self._say(f"{event.id} the loss came back: no surgery")
            return self.write(run, event.with_(state=HEALED))
        if chosen is None or chosen.recipe is None:
            return self.ask(run, event, "no recipe is known that this run can take")
        recipe = from_data({**chosen.recipe, "why": f"{_mark(event)} {event.what}"})
        end = time.monotonic() + QUIET_S
        while run.writers() and time.monotonic() < end:  # what the trainer wrote may be fresh
            time.sleep(PAUSE_S)
        receipt = surgery.apply(run, surgery.plan(run, recipe))
        self._say(f"{event.id} {chosen.remedy.name}: surgery {receipt.id}")
        event = event.with_(state=HEALED, receipt=receipt.id, recipe=chosen.remedy.name)
        return self.write(run, event)

    def _check(self, run: Run, event: Event) -> Event:
        seen = decide(self._open(), soundness.MEANING, repair=True, wait=WAIT_S)
        if not seen.ready:
            return self.ask(run, event, f"the next start is not sound: {seen.found[0].what}")
        if seen.receipt is not None:
            self._say(f"{event.id} the start was repaired: surgery {seen.receipt}")
        clear_switch(run)
        return self.write(run, event.with_(state=READY))


def _hopeless(event: Event) -> str:
    """Why nothing is done about it, whatever the policy says."""
    if event.cause == COLD or event.status == BROKEN:
        return "another start would do the same"
    if event.cause == ENDED and event.status is None:
        return "a person may have stopped it"
    return ""


def beyond(policy: Policy, known: list[Event], event: Event) -> str:
    """Which bound of the policy keeps the watch from treating `event`, given those that are
    `known`; empty where none does."""
    before = [each for each in known if each.id < event.id]
    if event.cause in (HUNG, ENDED):
        times = 0
        for each in reversed(before):
            if each.cause not in (HUNG, ENDED) or each.saved != event.saved:
                break
            times += each.state != ASKED
        if times >= policy.max_restarts:
            return (
                f"{count(times, 'start')} brought no new step (max_restarts {policy.max_restarts})"
            )
        return ""
    treated = [each for each in before if each.receipt is not None]
    for each in treated:
        if event.step is None or each.step is None or each.signal != event.signal:
            continue
        if abs(event.step - each.step) <= NEAR:
            return f"the same first sign, {each.signal}, as in {each.id}: that did not help"
    if len(treated) >= policy.max_surgeries:
        made = count(len(treated), "surgery was", "surgeries were")
        return f"{made} made (max_surgeries {policy.max_surgeries})"
    last = max((each.step for each in treated if each.step is not None), default=None)
    if last is not None and event.step is not None and event.step < last + policy.min_steps:
        return (
            f"it is at step {event.step}, and the last one was at {last} "
            f"(min_steps {policy.min_steps})"
        )
    return ""


def operated_since(run: Run, event: Event) -> bool:
    """Whether a surgery was made after it."""
    return next_id(run.root) != event.next


def _mark(event: Event) -> str:
    """How the reason of its surgery begins."""
    return f"watch {event.id}:"


def _receipt(run: Run, event: Event) -> str | None:
    """The surgery of an event, where it was made."""
    made = [each.id for each in run.receipts() if each.why.startswith(_mark(event))]
    return made[-1] if made else None
