"""Text to token ids: bytes as they are, or a Hugging Face `tokenizers` file."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .errors import UsageError


class Tokenizer(Protocol):
    """Ids lie in [0, vocab_size); `eod` ends a document, None when there is no such id."""

    vocab_size: int
    eod: int | None

    def encode(self, text: str) -> npt.NDArray[np.integer]: ...


class ByteTokenizer:
    """UTF-8 bytes; byte 0, which text does not contain, ends a document."""

    vocab_size = 256
    eod: int | None = 0

    def encode(self, text: str) -> npt.NDArray[np.integer]:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)


class FileTokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` library (optional dependency)."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError:
            raise UsageError(
                f"{path}: reading a tokenizer file needs the `tokenizers` package",
                next="pip install tokenizers, or --tokenizer byte",
            ) from None
        if not path.is_file():
            raise UsageError(f"{path}: no such tokenizer file", next="--tokenizer byte")
        self._tokenizer = HuggingFaceTokenizer.from_file(str(path))
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.eod: int | None = self._tokenizer.token_to_id("<|endoftext|>")

    def encode(self, text: str) -> npt.NDArray[np.integer]:
        return np.array(self._tokenizer.encode(text).ids, dtype=np.int64)


def load_tokenizer(name: str) -> Tokenizer:
    """`byte`, or the path of a tokenizer file."""
    return ByteTokenizer() if name == "byte" else FileTokenizer(Path(name))
