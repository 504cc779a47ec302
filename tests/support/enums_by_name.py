"""Pickles as Python 3.11.2 makes them, that of Debian 12: a member of an enum by its name."""

from __future__ import annotations

import io
import pickle
from enum import Enum
from types import SimpleNamespace
from typing import Any
from uuid import SafeUUID

HERE = b"getattr" in pickle.dumps(SafeUUID.safe)
"""Whether this Python does it; torch.load with weights_only refuses such a file."""


class Pickler(pickle.Pickler):
    """That of the standard library, with this one difference."""

    def reducer_override(self, value: Any) -> Any:
        """The attribute of the class with this name."""
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


MODULE = SimpleNamespace(Pickler=Pickler, __name__="pickle")
"""What `torch.save` takes as its `pickle_module`."""


def dumped(value: Any, protocol: int) -> bytes:
    """As `pickle.dumps` does there."""
    file = io.BytesIO()
    Pickler(file, protocol).dump(value)
    return file.getvalue()
