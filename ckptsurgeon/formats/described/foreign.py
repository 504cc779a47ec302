"""Steps that a library other than torch saved, which are not edited: named, with what helps."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import UsageError
from ckptsurgeon.files.archives.sniff import another
from ckptsurgeon.formats.described.file_pattern import listed_in
from ckptsurgeon.transaction.home import HOME

ENDINGS = (".zip", ".bin", ".h5", ".hdf5", ".keras")
MOST, DEPTH = 1_000, 3
"""Names that are looked at, and how many of them lead to a file at most."""
INSTEAD = {
    "Stable-Baselines3": "PPO.load(FILE, custom_objects={'learning_rate': LR})    or the class of "
    "your algorithm: FILE is an older step, and the rate of each update is that one",
    "llm.c": "move DONE_<step> of the later steps away: -y 1 resumes the highest; -l sets the rate",
    "Keras": "keras.models.load_model(FILE), then set model.optimizer.learning_rate",
}
"""What to do with such a file, by the library."""


def foreign(run: Path) -> UsageError | None:
    """The refusal of the first such file at `run` or below."""
    left, todo = MOST, deque([(run, 1)])
    while todo and left > 0:
        folder, depth = todo.popleft()
        for path in listed_in(folder)[:left]:
            left -= 1
            if path.name.endswith(ENDINGS) and (library := another(path)):
                return UsageError(
                    f"{path} was saved by {library}: it is no file of torch.save, and is not "
                    "edited here",
                    next=INSTEAD[library],
                )
            if path.name != HOME and depth < DEPTH and disk.is_folder(path):
                todo.append((path, depth + 1))
    return None
