"""Notes about surgeries that TensorBoard shows beside the curves."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.logs.new_names import TEXT
from ckptsurgeon.logs.tensorboard import event_file, message
from ckptsurgeon.logs.tensorboard.event_file import BORN
from ckptsurgeon.logs.tensorboard.frame import frame
from ckptsurgeon.plans.edits import Content, Rewrite, relative
from ckptsurgeon.plans.log_fields import TENSORBOARD
from ckptsurgeon.transaction.home import EVENTS, NOTE

TAG = "ckptsurgeon/surgery" + TEXT


def note(logdir: Path, root: Path, step: int, text: str, when: float) -> Rewrite:
    """A small event file that shows `text` (Markdown) at `step` in TensorBoard's text dashboard, as
    `ckptsurgeon/surgery`: whoever looks at the curves sees what was done to them. It is cut like
    everything else when the run goes back to before that step.

    By name it comes after the files in the folder and before those of the next trainer, whose
    clock may be behind: TensorBoard never shows what a file gets whose name is not the last."""
    names = (BORN.search(path.name) for path in event_file.files(logdir))
    born = max((int(name[0]) for name in names if name), default=int(when))
    number = 1
    while disk.exists(path := logdir / f"events.out.{EVENTS}.{born}.~{number}{NOTE}"):
        number += 1
    event = message.text_event(when, step, TAG, text)
    data = event_file.version_record(when) + frame(event)
    content = Content((data,), int(when * 1e9))
    return Rewrite(
        relative(path, root), TENSORBOARD, content, f"a note at step {step}", new_file=True
    )
