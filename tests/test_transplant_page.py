"""docs/transplant.md shows what its commands print, and its page of names is one."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ckptsurgeon.errors import UsageError
from ckptsurgeon.operations import parameter_names
from tests.cli.conftest import invoke
from tests.support.launch import REPO, launch
from tests.support.transcripts import BLOCK, matches

PAGE = (REPO / "docs" / "transplant.md").read_text("utf-8")


STAGES, TENSOR = "pipeline_model_parallel_size=2", "tensor_model_parallel_size=2"
ELSEWHERE = ("library",)
"""Transcripts that tests/formats/test_transplant_transcript.py compares: they need libraries."""
CASES: dict[str, tuple[list[tuple[str, int, str]], list[str]]] = {
    "two ranks become one": ([("old", 2, ""), ("new", 1, "")], ["ranks"]),
    "a pipeline becomes tensor ranks": (
        [("old", 2, STAGES), ("new", 2, TENSOR)],
        ["map", "stages"],
    ),
}
"""The runs, their ranks and what cuts them, and the transcripts, one after another."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_each_case_prints_what_the_page_shows(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    runs, transcripts = CASES[case]
    with TemporaryDirectory() as folder:  # whose path is short enough for a line
        monkeypatch.chdir(folder)
        (rules,) = re.findall(r"<!-- names: stages -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)
        Path("names.yaml").write_text(rules)
        for name, ranks, cut in runs:
            steps, seed = (6, 1) if name == "old" else (1, 2)
            launch(
                f"--config={REPO / 'train/configs/tiny.yaml'}", "--from-scratch",
                f"save={Path(folder) / name}", f"data={corpus}", f"train_iters={steps}",
                f"save_interval={steps}", f"seed={seed}", *filter(None, [cut]),
                ranks=ranks,
            )  # fmt: skip
        for name in transcripts:
            shown = dict(BLOCK.findall(PAGE))[name].splitlines()
            words = shown[0].removeprefix("$ ckptsurgeon ").split()
            done = invoke(*words, *([] if "--print-map" in words else ["--yes"]))
            assert done.exit_code == 0, done.output
            assert matches(shown[1:], done.stdout.splitlines()), done.stdout


def test_each_transcript_of_the_page_is_held_against_its_command() -> None:
    told = [name for _, names in CASES.values() for name in names]
    assert sorted(dict(BLOCK.findall(PAGE))) == sorted([*told, *ELSEWHERE])


def test_the_names_of_the_page_are_rules(tmp_path: Path) -> None:
    (rules,) = re.findall(r"<!-- names: stages -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)
    (more,) = re.findall(r"```yaml\n(fuse:.*?)```", PAGE, re.DOTALL)
    page = tmp_path / "names.yaml"
    page.write_text(rules + more)
    read = parameter_names.read(str(page))
    names = ["1.weight", "4.bias", "3.dense.weight", "layers.0.mlp.gate.weight",
             "layers.0.mlp.up.weight", "layers.7.qkv.weight", "other"]  # fmt: skip
    own = [
        "position_embeddings.weight", "final_layernorm.bias", "layers.1.dense.weight",
        "layers.0.mlp.gate_up.weight", "layers.7.q.weight", "layers.7.k.weight",
        "layers.7.v.weight", "other",
    ]  # fmt: skip
    origins = {new: origin for new, (origin,) in read.origins(names, own).items()}
    assert {new: origin.sources for new, origin in origins.items()} == {
        "position_embeddings.weight": ("1.weight",),
        "final_layernorm.bias": ("4.bias",),
        "layers.1.dense.weight": ("3.dense.weight",),
        "layers.0.mlp.gate_up.weight": ("layers.0.mlp.gate.weight", "layers.0.mlp.up.weight"),
        "layers.7.q.weight": ("layers.7.qkv.weight",),
        "layers.7.k.weight": ("layers.7.qkv.weight",),
        "layers.7.v.weight": ("layers.7.qkv.weight",),
        "other": ("other",),
    }
    assert origins["layers.7.v.weight"].index == 2
    back = {old: way.sources for old, (way,) in read.origins(own, names).items()}
    assert back == {
        "1.weight": ("position_embeddings.weight",),
        "4.bias": ("final_layernorm.bias",),
        "3.dense.weight": ("layers.1.dense.weight",),
        "layers.0.mlp.gate.weight": ("layers.0.mlp.gate_up.weight",),
        "layers.0.mlp.up.weight": ("layers.0.mlp.gate_up.weight",),
        "layers.7.qkv.weight": ("layers.7.q.weight", "layers.7.k.weight", "layers.7.v.weight"),
        "other": ("other",),
    }


def test_what_the_page_transposes_is_transposed_in_both_directions(tmp_path: Path) -> None:
    (rules,) = re.findall(r"<!-- names: conv1d -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)
    page = tmp_path / "names.yaml"
    page.write_text(rules + "rename: {'transformer.{rest}': '{rest}'}\n")
    read = parameter_names.read(str(page))
    theirs = ["transformer.h.3.mlp.c_fc.weight", "transformer.h.3.mlp.c_fc.bias"]
    own = ["h.3.mlp.c_fc.weight", "h.3.mlp.c_fc.bias"]
    for source, run, where in ((theirs, own, "there"), (own, theirs, "here")):
        found = read.origins(source, run)
        assert [found[name][0].turned for name in run] == [where, ""]


def test_the_page_of_heads_adds_to_one_that_is_shipped(tmp_path: Path) -> None:
    (rules,) = re.findall(r"<!-- names: heads -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)
    page = tmp_path / "names.yaml"
    page.write_text(rules)
    read = parameter_names.read(str(page))
    assert read.sizes == {"heads": 32, "kv_heads": 8}
    query, mine = (
        "model.layers.3.self_attn.q_proj.weight",
        "layers.3.attention.qkv_linear.wq.weight",
    )
    (way,) = read.origins([query], [mine])[mine]
    assert (way.sources, way.heads, way.to_pairs) == ((query,), ("heads",), True)
    (way,) = read.origins([mine], [query])[query]
    assert (way.sources, way.heads, way.to_pairs) == ((mine,), ("heads",), False)


def test_an_own_rule_goes_before_the_same_one_of_a_shipped_page(tmp_path: Path) -> None:
    page = tmp_path / "names.yaml"
    name = "model.norm.weight"
    page.write_text(f"use: llama-huggingface-torchtitan\nrename: {{{name}: last.weight}}\n")
    read = parameter_names.read(str(page))
    assert read.rename[name] == "last.weight"
    assert next(iter(read.rename)) == name
    assert len(read.rename) == len(parameter_names.read("llama-huggingface-torchtitan").rename)


def test_each_page_that_is_shipped_is_read_and_named_in_the_docs() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == parameter_names.shipped()
    for name in rows:
        assert parameter_names.read(name).rename or parameter_names.read(name).fuse


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("use: llama", "no page of that name is shipped"),
        ("sizes: {head: 3}", "sizes is no table of heads and kv_heads to numbers"),
        ("sizes: {heads: 0}", "0 is not a whole number above 0"),
        ("sizes: {heads: heads}", "heads is not a whole number above 0"),
        ("groups: {a.weight: many}", "many is not a whole number above 0, heads or kv_heads"),
        ("transpose: {a.weight: b.weight}", "transpose is no list of names"),
        ("halves_to_pairs: [a.weight]", "halves_to_pairs is no table of names to numbers"),
    ],
)
def test_a_page_that_is_wrong_says_where(tmp_path: Path, text: str, reason: str) -> None:
    page = tmp_path / "names.yaml"
    page.write_text(text + "\n")
    with pytest.raises(UsageError, match=reason):
        parameter_names.read(str(page))
