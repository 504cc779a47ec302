"""A watch over one run: it looks, and does what a policy allows; all that it does it has written
down before, so that one which is killed is gone on with by the next."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptsurgeon import surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.one_look import look_again
from ckptsurgeon.guard import event as events
from ckptsurgeon.guard import evidence, trainer, trouble
from ckptsurgeon.guard.event import ASKED, HEALED, OPEN, READY, SEEN, STARTED, STOPPED, Event
from ckptsurgeon.guard.policy import COLD, DIVERGED, ENDED, HUNG, NAN, Policy
from ckptsurgeon.guard.ready import decide
from ckptsurgeon.guard.trainer import Process
from ckptsurgeon.guard.trouble import Trouble
from ckptsurgeon.look.advise.advice import DIVERGED as HAS_DIVERGED
from ckptsurgeon.look.resumed.resume import Stamps, later_steps
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run

if TYPE_CHECKING:
    from ckptsurgeon.logs.curves import Curves

SHARE = 10
"""Judging the curves takes at most one part in so many of the time."""
BROKEN = 4
"""The status of `relaunch` where the trainer does not do what was promised."""


class Watch:
    """A watch over the run that `open` gives.

    `read` gives its curves; `also` are the log files that it reads in place of the run's own. `at`
    is the trainer, where it was named; one that is started gets `options`. In a `job` it stops the
    trainer, and leaves the rest to the one that the job's script asks with `after`. What happens
    goes to `say`."""

    def __init__(
        self,
        open: Callable[[], Run],
        read: Callable[[Run], Curves],
        policy: Policy,
        say: Callable[[str], None],
        *,
        also: Callable[[Run], Sequence[Path]] = lambda run: (),
        at: Process | None = None,
        job: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        self._open, self._read, self._policy, self.say = open, read, policy, say
        self._also, self._at, self._job, self._options = also, at, job, options
        self._named = at is not None
        self._last = STOPPED if job else STARTED
        self._child: subprocess.Popen[bytes] | None = None
        self._since = time.time()
        self._base: tuple[int, Stamps] | None = None
        self._judge_from = 0.0
        self.done: list[Event] = []

    # --- from outside ----------------------------------------------------------------------------

    def once(self, *, dry: bool = False) -> Trouble | None:
        """Look once and do what the policy says, or with `dry` nothing. One look can tell neither
        what a first save says nor that a trainer has ended."""
        self._since, self._base = 0.0, None
        run = self._open()
        found = self._look(run)
        if found is not None and not dry:
            self._meet(run, found)
        return found

    def follow(self, *, start: bool = False) -> bool:
        """Look until the trainer has ended, or a person is asked and nothing is left to look at.
        With `start` the trainer is started first, unless it runs. True if it ended well."""
        run = self._open()
        waiting = self._waiting(run)
        if waiting is not None and not self._treat(waiting):
            return False
        run = self._open()
        if start and self._trainer(run) is None:
            self._start(events.new(run.root, "", "the trainer was started"))
        else:
            self._rebase(run)
        while True:
            run_now = self._look_again()
            if run_now is not None:
                ended = self._ended(run_now)
                if isinstance(ended, bool):
                    return ended
                found = self._look(run_now) if ended is None else ended
                if found is not None and not self._meet(run_now, found):
                    return False
            time.sleep(self._policy.every)

    def after(self, status: int) -> bool:
        """The trainer has ended with this status, and a job asks: True if it is to start again."""
        self._last = READY
        run = self._open()
        event = self._waiting(run)
        if event is not None:
            return self._treat(event)
        if status == 0 or not self._policy.wants(ENDED):
            return False
        return self._meet(run, _of_status(status)) and self._policy.acts

    # --- looking ---------------------------------------------------------------------------------

    def _look_again(self) -> Run | None:
        look_again()
        try:
            return self._open()
        except (SurgeryError, OSError) as error:
            self.say(f"can't look: {error}")
            return None

    def _look(self, run: Run) -> Trouble | None:
        """What is wrong now and is not known yet."""
        try:
            return next((each for each in self._troubles(run) if not self._known(run, each)), None)
        except (SurgeryError, OSError) as error:  # a file that is being written
            self.say(f"can't look: {error}")
            return None

    def _troubles(self, run: Run) -> Iterable[Trouble]:
        wants, since = self._policy.wants, max(self._since, self._acted(run))
        if (wants(DIVERGED) or wants(NAN)) and self._to_judge(run):
            began = time.monotonic()
            found = trouble.of_the_loss(self._read(run))
            self._judge_from = time.monotonic() + (SHARE - 1) * (time.monotonic() - began)
            if found is not None and wants(found.cause):
                yield found
        if wants(COLD) and self._base is not None:
            seen = trouble.of_the_first_save(run, *self._base)
            if seen is not None:
                self._base = None
                self.say(f"step {seen[0]} was saved")
                if seen[1] is not None:
                    yield seen[1]
        if wants(HUNG) and not _complete(run):
            found = trouble.of_silence(run, self._policy, since, self._also(run))
            if found is not None:
                yield found

    def _to_judge(self, run: Run) -> bool:
        """Whether the logs have said anything since the last act, and it is not too soon."""
        if time.monotonic() < self._judge_from:
            return False
        return trouble.written(self._also(run) or trouble.logs(run)) > self._acted(run)

    def _acted(self, run: Run) -> float:
        """When the run was changed last by a watch."""
        acts = [each.acted for each in events.read(run.root) if each.state != ASKED]
        return max(acts, default=0.0)

    def _known(self, run: Run, found: Trouble) -> bool:
        """Whether a person was asked about it, and nobody has operated since."""
        asked = [each for each in events.read(run.root) if each.state == ASKED]
        same = [each for each in asked if each.cause == found.cause and not _operated(run, each)]
        if found.cause == HUNG:
            return any(each.acted > trouble.last_word(run, self._also(run)) for each in same)
        return any(
            each.signal == found.signal
            and abs((each.step or 0) - (found.step or 0)) <= trouble.NEAR
            for each in same
        )

    # --- the trainer -----------------------------------------------------------------------------

    def _trainer(self, run: Run) -> Process | None:
        """The process that is watched, if it runs."""
        if self._at is not None and self._at.runs:
            return self._at
        if self._named:
            return None
        for each in reversed(events.read(run.root)):
            if (own := trainer.started(run, each)) is not None:
                return own
        return trainer.found(run)

    def _ended(self, run: Run) -> Trouble | bool | None:
        """None while the trainer runs, or was never seen; True where it ended as it should."""
        at = self._trainer(run)
        if at is not None:
            self._at = at
            return None
        if self._at is None and self._child is None:
            return None
        status = None if self._child is None else self._child.wait()
        self._at = self._child = None
        if self._job:
            return True
        if status == 0 or (status is None and (_complete(run) or _switched_off(run))):
            self.say("the trainer has ended")
            return True
        if not self._policy.wants(ENDED):
            self.say(f"the trainer has ended{'' if status is None else f' with {status}'}")
            return False
        return _of_status(status)

    # --- acting ----------------------------------------------------------------------------------

    def _waiting(self, run: Run) -> Event | None:
        """The event that a watch was killed in, or that it left to this one."""
        last = events.read(run.root)[-1:]
        if not last or not self._policy.acts or last[0].state not in (*OPEN, READY):
            return None
        return None if last[0].state == READY and self._trainer(run) is not None else last[0]

    def _meet(self, run: Run, found: Trouble) -> bool:
        """Do what the policy says. False where the watch ends with it."""
        steps = run.steps()
        event = events.new(
            run.root, found.cause, found.what, step=found.step, signal=found.signal,
            saved=steps[-1] if steps else None, status=found.status,
        )  # fmt: skip
        self.say(f"{event.id} {found.what}")
        if self._policy.acts:
            return self._treat(self._write(run, event))
        if found.cause in (DIVERGED, NAN):
            event = self._gathered(run, event)
        self._ask(run, event, "the policy says advise")
        return found.cause != ENDED

    def _gathered(self, run: Run, event: Event) -> Event:
        try:
            _, chosen = evidence.gather(run, self._read(run), event.id)
        except (SurgeryError, OSError) as error:
            self.say(f"{event.id} no recipe: {error}")
            return event
        return event if chosen is None else event.with_(recipe=chosen.remedy.name)

    def _treat(self, event: Event) -> bool:
        """Stop, operate, check, start: from where it stands to the last of these that is this one's
        to do. False once a person is asked, and where another goes on."""
        run = self._open()
        try:
            if event.state == SEEN:
                event = self._stop(run, event)
            if event.state == STOPPED and self._last != STOPPED:
                event = self._heal(run, event)
            if event.state == HEALED:
                event = self._check(run, event)
            if event.state == READY and self._last == STARTED:
                event = self._start(event)
        except (SurgeryError, OSError) as error:
            event = self._ask(run, event, getattr(error, "what", None) or str(error))
        return event.state == self._last != STOPPED

    def _stop(self, run: Run, event: Event) -> Event:
        at = self._trainer(run)
        why = trainer.stop(run, self._policy, at, event.id, hung=event.cause == HUNG)
        if why:
            return self._ask(run, event, f"the trainer can't be stopped: {why}")
        if self._child is not None:
            self._child.wait()
        self._at = self._child = None
        return self._write(run, event.with_(state=STOPPED))

    def _heal(self, run: Run, event: Event) -> Event:
        """The surgery, where one helps; it may be done already."""
        before = _receipt(run, event)
        if before is not None:
            return self._write(run, event.with_(state=HEALED, receipt=before))
        if run.interrupted():
            surgery.recover(run)
            return self._heal(self._open(), event)
        why = trouble.beyond(self._policy, events.read(run.root), event)
        if event.cause == COLD or event.status == BROKEN:
            why = "another start would do the same"
        if event.cause == ENDED and event.status is None:
            why = "a person may have stopped it"
        if why:
            return self._ask(run, event, why)
        if event.cause in (HUNG, ENDED):
            return self._write(run, event.with_(state=HEALED))
        return self._operate(run, event)

    def _operate(self, run: Run, event: Event) -> Event:
        diagnosis, chosen = evidence.gather(run, self._read(run), event.id)
        if diagnosis.verdict != HAS_DIVERGED:
            self.say(f"{event.id} the loss came back: no surgery")
            return self._write(run, event.with_(state=HEALED))
        if chosen is None or chosen.recipe is None:
            return self._ask(run, event, "no recipe is known that this run can take")
        recipe = from_data({**chosen.recipe, "why": f"{_mark(event)} {event.what}"})
        receipt = surgery.apply(run, surgery.plan(run, recipe))
        self.say(f"{event.id} {chosen.remedy.name}: surgery {receipt.id}")
        return self._write(
            run, event.with_(state=HEALED, receipt=receipt.id, recipe=chosen.remedy.name)
        )

    def _check(self, run: Run, event: Event) -> Event:
        seen = decide(self._open(), 2, repair=True, wait=600)
        if not seen.ready:
            return self._ask(run, event, f"the next start is not sound: {seen.found[0].what}")
        if seen.receipt is not None:
            self.say(f"{event.id} the start was repaired: surgery {seen.receipt}")
        trainer.clear_switch(run)
        return self._write(run, event.with_(state=READY))

    def _start(self, event: Event) -> Event:
        run = self._open()
        self._write(run, event.with_(state=READY))
        self._child = trainer.start(run, event, self._options)
        self._at = Process.of(self._child.pid)
        process = () if self._at is None else (self._at.pid, self._at.start)
        event = self._write(run, event.with_(state=STARTED, process=process))
        where = events.folder(run.root, event.id) / trainer.OUTPUT
        self.say(f"the trainer starts at step {run.latest()}; it prints to {where}")
        self._since = time.time()
        self._rebase(run)
        return event

    def _rebase(self, run: Run) -> None:
        """The next new step is held against the one that the trainer loads now."""
        try:
            step = run.latest()
        except SurgeryError:
            self._base = None
        else:
            self._base = step, later_steps(run, step)

    def _ask(self, run: Run, event: Event, why: str) -> Event:
        """A person is asked, and told once."""
        event = self._write(run, event.with_(state=ASKED, why=why))
        self.say(f"{event.id} {why}; next: {evidence.next_command(run, event)}")
        failed = evidence.notify(run, self._policy, event)
        if failed:
            self.say(f"{event.id} nobody was told: {failed}")
            return event
        return self._write(run, event.with_(notified=bool(self._policy.notify)))

    def _write(self, run: Run, event: Event) -> Event:
        self.done = [each for each in self.done if each.id != event.id] + [event]
        return events.write(run.root, event)


def _of_status(status: int | None) -> Trouble:
    if status is None:
        what = "the trainer has ended; with which status is not known"
    elif status == BROKEN:
        what = "the trainer does not do what was promised, says relaunch"
    else:
        what = f"the trainer ended with status {status}"
    return Trouble(ENDED, what, status=status)


def _mark(event: Event) -> str:
    """How the reason of its surgery begins."""
    return f"watch {event.id}:"


def _receipt(run: Run, event: Event) -> str | None:
    """The surgery of an event, where it was made."""
    made = [each.id for each in run.receipts() if each.why.startswith(_mark(event))]
    return made[-1] if made else None


def _operated(run: Run, event: Event) -> bool:
    """Whether a surgery was made after it."""
    from datetime import datetime

    seen = datetime.fromisoformat(event.when.replace("Z", "+00:00"))
    return any(datetime.fromisoformat(each.when) > seen for each in run.receipts())


def _complete(run: Run) -> bool:
    """Whether the bundled trainer has saved its last step."""
    from ckptsurgeon.files import plain_yaml
    from ckptsurgeon.run.run import CONFIG

    if run.settings.get("relaunch") is not None or not (run.root / CONFIG).is_file():
        return False
    last = plain_yaml.read(run.root / CONFIG).get("train_iters")
    return isinstance(last, int) and run.latest() >= last


def _switched_off(run: Run) -> bool:
    """Whether a person has stopped it by its kill switch."""
    from ckptsurgeon.launch.relaunch import kill_switch

    switch = kill_switch(run)
    return switch is not None and switch.is_file()
