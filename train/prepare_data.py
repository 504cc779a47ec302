"""`prepare-data`: build a Megatron .bin/.idx pair from text files or from Python's own manual."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .errors import UsageError
from .indexed_dataset import IndexedDatasetWriter
from .tokenizer import Tokenizer, load_tokenizer


def prepare_data(prefix: str, tokenizer_name: str, files: Sequence[str], pydoc: bool) -> None:
    """One document per file (or per topic of `pydoc_data.topics`, sorted), each ended by eod."""
    if bool(files) == pydoc:
        raise UsageError(
            "prepare-data reads either text files or --pydoc",
            next="python -m train prepare-data --output PREFIX --pydoc",
        )
    tokenizer = load_tokenizer(tokenizer_name)
    documents = _topics() if pydoc else _texts(files)
    count = total = 0
    with IndexedDatasetWriter(prefix, tokenizer.vocab_size) as writer:
        for text in documents:
            tokens = _encode(tokenizer, text)
            writer.add_document(tokens)
            count += 1
            total += len(tokens)
    print(
        f"{prefix}.bin, {prefix}.idx: {count} documents, {total} tokens, "
        f"vocabulary {tokenizer.vocab_size}",
        file=sys.stderr,
    )


def _encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    tokens = tokenizer.encode(text)
    if tokenizer.eod is None:
        return tokens
    return np.append(tokens, np.array([tokenizer.eod], dtype=tokens.dtype))


def _topics() -> Iterable[str]:
    from pydoc_data.topics import topics

    return (topics[name] for name in sorted(topics))


def _texts(files: Sequence[str]) -> Iterable[str]:
    for name in files:
        try:
            yield Path(name).read_text(encoding="utf-8", errors="replace")
        except OSError as e:
            raise UsageError(f"{name}: {e.strerror}", next="name text files that exist") from None
