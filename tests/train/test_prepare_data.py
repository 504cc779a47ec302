"""`prepare-data`: text in, an indexed dataset out."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.errors import UsageError
from train.indexed_dataset import IndexedDataset
from train.prepare_data import prepare_data


def test_each_file_is_one_document_ended_by_byte_0(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("héllo")
    (tmp_path / "b.txt").write_text("you")
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    prepare_data(str(tmp_path / "out"), "byte", files, pydoc=False)
    dataset = IndexedDataset(tmp_path / "out")
    assert [bytes(dataset[i].astype("u1")) for i in range(2)] == ["héllo\0".encode(), b"you\0"]


def test_pythons_manual_is_one_document_per_topic_in_order(tmp_path: Path) -> None:
    from pydoc_data.topics import topics

    prepare_data(str(tmp_path / "out"), "byte", [], pydoc=True)
    dataset = IndexedDataset(tmp_path / "out")
    assert len(dataset) == len(topics)
    assert bytes(dataset[0].astype("u1")[:-1]).decode() == topics[min(topics)]


def test_a_tokenizers_file_is_used_and_decodes_to_the_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    text = "the cat sat on the mat"
    (tmp_path / "a.txt").write_text(text)
    words = {word: i for i, word in enumerate(["<|endoftext|>", *sorted(set(text.split()))])}
    model = tokenizers.models.WordLevel(words, unk_token="<|endoftext|>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = [str(tmp_path / "a.txt")]
    prepare_data(str(tmp_path / "out"), str(tmp_path / "tokenizer.json"), files, pydoc=False)
    ids = IndexedDataset(tmp_path / "out")[0].tolist()
    assert ids[-1] == words["<|endoftext|>"]
    assert tokenizer.decode(ids[:-1]) == text


@pytest.mark.parametrize(
    ("tokenizer", "files", "pydoc", "says"),
    [
        ("byte", [], False, "either text files or --pydoc"),
        ("byte", ["x.txt"], True, "either text files or --pydoc"),
        ("byte", ["/nowhere/x.txt"], False, "/nowhere/x.txt: No such file"),
        ("/nowhere/t.json", ["x.txt"], False, "/nowhere/t.json"),
    ],
)
def test_bad_requests_leave_nothing(
    tmp_path: Path, tokenizer: str, files: list[str], pydoc: bool, says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        prepare_data(str(tmp_path / "out"), tokenizer, files, pydoc)
    assert says in caught.value.what
    assert list(tmp_path.iterdir()) == []
