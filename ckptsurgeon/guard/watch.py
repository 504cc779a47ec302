"""A watch over one run: when it looks, what it takes for new, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.files.one_look import look_again
from ckptsurgeon.guard import event as events
from ckptsurgeon.guard import trouble
from ckptsurgeon.guard.event import ASKED, OPEN, READY, STARTED, STOPPED, Event
from ckptsurgeon.guard.policy import COLD, DIVERGED, ENDED, HUNG, NAN, Policy
from ckptsurgeon.guard.trainer import Trainer
from ckptsurgeon.guard.treatment import BROKEN, NEAR, Treatment, operated_since
from ckptsurgeon.guard.trouble import Trouble
from ckptsurgeon.launch.kill_switch import kill_switch
from ckptsurgeon.look.advise.advice import DIVERGED as HAS_DIVERGED
from ckptsurgeon.look.advise.advice import HEALTHY, judge
from ckptsurgeon.look.resumed.resume import Stamps, later_steps
from ckptsurgeon.run.run import CONFIG, Run
from ckptsurgeon.transaction.receipts import next_id

if TYPE_CHECKING:
    from ckptsurgeon.logs.curves import Curves

BLIND = "blind"
"""The cause of the event that a watch writes which can't look."""
SHARE = 10
"""Judging the curves takes at most one part in so many of the time."""


class Watch:
    """A watch over the run that `open` gives.

    `read` gives its curves; `also` are the log files that it reads in place of the run's own. In a
    `job` it stops the trainer, and leaves the rest to the one that the job's script asks with
    `after`. What happens goes to `say`."""

    def __init__(
        self,
        open: Callable[[], Run],
        read: Callable[[Run], Curves],
        policy: Policy,
        say: Callable[[str], None],
        trainer: Trainer,
        *,
        also: Callable[[Run], Sequence[Path]] = lambda run: (),
        job: bool = False,
    ) -> None:
        self._open, self._read, self._policy, self._say = open, read, policy, say
        self._trainer, self._also, self._job = trainer, also, job
        self._treatment = Treatment(open, read, policy, say, trainer)
        self._since = time.time()
        self._base: tuple[int, Stamps] | None = None
        self._surgery = ""
        self._judge_from = 0.0
        self._unseen = self._loss = ""
        self._saw = time.monotonic()

    @property
    def done(self) -> list[Event]:
        """The events of this watch, as they are now."""
        return list(self._treatment.done.values())

    def asks(self, run: Run) -> bool:
        """Whether this watch asked a person, and nobody has operated since."""
        return self._treatment.asks(run)

    def once(self, *, dry: bool = False) -> bool:
        """Look once and do what the policy says, or with `dry` nothing. One look can tell neither
        what a first save says nor that a trainer has ended. True where nothing new is wrong, or
        it was treated; what a person was asked about and is still so is said again."""
        run = self._open()
        self._since, self._base, self._surgery = 0.0, None, next_id(run.root)
        troubles = list(self._troubles(run))
        found = next((each for each in troubles if not self._known(run, each)), None)
        if not dry:
            self._treatment.tell_again(run)
        if found is None:
            open_ = f": you were asked about it: {troubles[0].what}" if troubles else ""
            self._say(f"nothing new is wrong{open_ or self._loss}")
            return True
        if dry:
            self._say(found.what)
            return False
        return self._meet(run, found, STARTED) and self._policy.acts

    def follow(self, *, start: bool = False) -> bool:
        """Look until the trainer has ended, or a person is asked and nothing is left to look at.
        With `start` the trainer is started first, unless it runs. True if it ended well, and
        nobody is asked."""
        last = STOPPED if self._job else STARTED
        run = self._open()
        waiting = self._waiting(run, OPEN if self._job else (*OPEN, READY))
        if waiting is not None and (not self._treatment.treat(waiting, last) or self._job):
            return False
        run = self._open()
        if start and self._trainer.now(run) is None:
            self._treatment.start(events.new(run.root, "", "the trainer was started"))
        self._rebase(run)
        steps = run.steps()
        self._say(f"follows {run.root}" + (f", saved up to step {steps[-1]}" if steps else ""))
        while True:
            look_again()
            ended: Trouble | bool | None = None
            try:
                run = self._open()
                self._treatment.tell_again(run)
                ended = self._ended(run)
                if isinstance(ended, bool):
                    return ended and not self.asks(run)
                found = self._look(run) if ended is None else ended
                self._saw = time.monotonic()
            except (SurgeryError, OSError) as error:
                self._cannot(run, error)
                found = None
            if found is not None:
                goes_on = self._meet(run, found, last)
                if not goes_on or (self._job if self._policy.acts else ended is not None):
                    return False
            time.sleep(self._policy.every)

    def after(self, status: int) -> bool:
        """The trainer has ended with this status, and a job asks: True if it is to start again."""
        run = self._open()
        event = self._waiting(run, OPEN)
        if event is not None:
            return self._treatment.treat(event, READY)
        found = self._last(run) or (None if status == 0 else _of_status(status))
        if found is None or (found.cause == ENDED and not self._policy.wants(ENDED)):
            return False
        return self._meet(run, found, READY) and self._policy.acts

    # --- looking ---------------------------------------------------------------------------------

    def _look(self, run: Run) -> Trouble | None:
        """What is wrong now and is not known yet. Raises SurgeryError, OSError where that can't be
        told: a file is being written, or the logs contradict each other."""
        return next((each for each in self._troubles(run) if not self._known(run, each)), None)

    def _cannot(self, run: Run, error: Exception) -> None:
        """Say why it could not look; ask a person, once, where it was blind for too long."""
        if str(error) != self._unseen:
            self._unseen = str(error)
            self._say(f"can't look: {error}")
        if time.monotonic() - self._saw > 60 * self._policy.hung:
            self._saw = float("inf")
            event = events.new(run.root, BLIND, f"the watch can't look: {error}")
            self._treatment.ask(run, event, "it sees no trouble until that is mended")

    def _troubles(self, run: Run) -> Iterable[Trouble]:
        wants, acted = self._policy.wants, _acted(run)
        if time.monotonic() >= self._judge_from:
            yield from self._of_the_loss(run, acted)
        if self._surgery != next_id(run.root):
            self._rebase(run)  # somebody has operated since
        if wants(COLD) and self._base is not None:
            seen = trouble.of_the_first_save(run, *self._base)
            if seen is not None:
                self._base = None
                self._say(f"step {seen[0]} was saved")
                if seen[1] is not None:
                    yield seen[1]
        if wants(HUNG) and not _complete(run):
            since = max(self._since, acted)
            found = trouble.of_silence(run, self._policy, since, self._also(run))
            if found is not None:
                yield found

    def _of_the_loss(self, run: Run, acted: float) -> Iterable[Trouble]:
        """What the logs say, where they have said anything since the last act."""
        wanted = self._policy.wants(DIVERGED) or self._policy.wants(NAN)
        if not wanted or trouble.written(self._also(run) or trouble.logs(run)) <= acted:
            return
        from ckptsurgeon.report.advice import verdict

        began = time.monotonic()
        told = judge(self._read(run))
        found = trouble.of_the_loss(told)
        self._loss = "" if told.verdict in (HEALTHY, HAS_DIVERGED) else f"; {verdict(told)}"
        self._judge_from = time.monotonic() + (SHARE - 1) * (time.monotonic() - began)
        if found is not None and self._policy.wants(found.cause):
            yield found

    def _last(self, run: Run) -> Trouble | None:
        """What the logs say of a trainer that has ended: no other look follows."""
        if _switched_off(run):
            return None
        try:
            found = self._of_the_loss(run, _acted(run))
            return next((each for each in found if not self._known(run, each)), None)
        except (SurgeryError, OSError) as error:
            self._say(f"can't look: {error}")
            return None

    def _known(self, run: Run, found: Trouble) -> bool:
        """Whether a person was asked about it, and nobody has operated since."""
        asked = [each for each in events.read(run.root) if each.state == ASKED]
        same = [e for e in asked if e.cause == found.cause and not operated_since(run, e)]
        if found.cause == HUNG:
            return any(each.acted > trouble.last_word(run, self._also(run)) for each in same)
        return any(
            each.signal == found.signal and abs((each.step or 0) - (found.step or 0)) <= NEAR
            for each in same
        )

    def _ended(self, run: Run) -> Trouble | bool | None:
        """None while the trainer runs, or was never seen; True where it ended as it should."""
        if self._trainer.now(run) is not None or not self._trainer.seen:
            return None
        status = self._trainer.status()
        if self._job:
            return True
        if status == 0 or (status is None and (_complete(run) or _switched_off(run))):
            self._say("the trainer has ended")
            return self._last(run) or True
        # Many trainers end with a failure where the loss is NaN; to start again would repeat it.
        found = None if status is None else self._last(run)
        if found is None and not self._policy.wants(ENDED):
            self._say(_of_status(status).what)
            return False
        return found or _of_status(status)

    # --- acting ----------------------------------------------------------------------------------

    def _waiting(self, run: Run, states: Collection[str]) -> Event | None:
        """The event that a watch was killed in, or that it left to this one, in one of `states`."""
        last = events.read(run.root)[-1:]
        if not last or not self._policy.acts or last[0].state not in states:
            return None
        runs = last[0].state == READY and self._trainer.now(run) is not None
        return None if runs else last[0]

    def _meet(self, run: Run, found: Trouble, last: str) -> bool:
        """Do what the policy says, up to the state `last`. False where the watch ends with it."""
        steps = run.steps()
        event = events.new(
            run.root, found.cause, found.what, step=found.step, signal=found.signal,
            saved=steps[-1] if steps else None, status=found.status,
        )  # fmt: skip
        self._say(f"{event.id} {found.what}")
        if self._policy.acts:
            treated = self._treatment.treat(event, last)
            self._since = time.time()
            self._rebase(self._open())
            return treated
        if found.cause in (DIVERGED, NAN):
            event = self._treatment.advised(run, event)
        self._treatment.ask(run, event, "the policy says advise")
        return found.cause != ENDED

    def _rebase(self, run: Run) -> None:
        """The next new step is held against the one that the trainer loads now."""
        self._surgery = next_id(run.root)
        try:
            step = run.latest()
        except SurgeryError:
            self._base = None
        else:
            self._base = step, later_steps(run, step)


def _acted(run: Run) -> float:
    """When the run was changed last by a watch (Unix time)."""
    acts = [each.acted for each in events.read(run.root) if each.state != ASKED]
    return max(acts, default=0.0)


def _of_status(status: int | None) -> Trouble:
    if status is None:
        what = "the trainer has ended; with which status is not known"
    elif status == BROKEN:
        what = "the trainer does not do what was promised, says relaunch"
    else:
        what = f"the trainer ended with status {status}"
    return Trouble(ENDED, what, status=status)


def _complete(run: Run) -> bool:
    """Whether the bundled trainer has saved its last step."""
    if run.settings.get("relaunch") is not None or not disk.is_file(run.root / CONFIG):
        return False
    last = plain_yaml.read(run.root / CONFIG).get("train_iters")
    return isinstance(last, int) and bool(run.steps()) and run.steps()[-1] >= last


def _switched_off(run: Run) -> bool:
    """Whether a person has stopped it by its kill switch."""
    switch = kill_switch(run)
    return switch is not None and disk.is_file(switch)
