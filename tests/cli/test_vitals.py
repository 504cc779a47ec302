"""doctor --vitals and verify --against as they are typed, also on what is damaged."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch

from ckptsurgeon.hints import Command
from ckptsurgeon.look.vitals.observations import advice
from tests.cli.conftest import Surgeon, hints
from tests.conftest import Trained
from tests.support.launch import REPO
from tests.support.torch_files import load_shard

OPTIM = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def test_the_signs_are_ten_lines_and_all_in_the_document(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    told = surgeon("doctor", "--vitals", "-C", root)
    assert told.exit_code == 0
    _, _, lines = told.stdout.partition("vitals: step 8")
    assert 1 <= len(lines.splitlines()) <= 13
    document = json.loads(surgeon("doctor", "--vitals", "--json", "-C", root).stdout)
    assert document["healthy"] and document["vitals"]["facts"] == []
    signs = {sign["parameter"]: sign for sign in document["vitals"]["signs"]}
    embeddings = signs["word_embeddings.weight"]
    assert (embeddings["rows"], embeddings["elements"]) == (256, 256 * 32)
    assert 0 < embeddings["update_rms"] < 1.2 and embeddings["norms"]["weights"] > 0


def test_a_missing_shard_and_a_nan_are_said_and_do_not_stop_the_doctor(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    path = root / "global_step8" / OPTIM
    held = load_shard(path)
    held["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][3] = math.nan
    torch.save(held, path)
    told = surgeon("doctor", "--vitals", "-C", root)
    assert told.exit_code == 4 and "(exp_avg) has NaN or Inf: 1 of" in told.stdout
    assert "vitals: step 8" in told.stdout
    path.unlink()
    told = surgeon("doctor", "--vitals", "-C", root)
    assert told.exit_code == 4 and "can't be read" in told.stdout and OPTIM in told.stdout


def test_against_takes_an_earlier_saved_step_alone(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    told = surgeon("verify", "--against", 6, "-C", root)
    assert told.stdout.splitlines()[0].endswith(", compared with step 6")
    assert told.exit_code == 0 and "level 4" in told.stdout
    for words, said in (((7,), "step 7 is not saved"), ((8,), "not before step 8")):
        refused = surgeon("verify", "--against", *words, "-C", root)
        assert refused.exit_code == 2 and said in refused.stderr


def test_the_document_of_verify_names_the_step_it_was_held_against(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    for words, against in (((), None), (("--after", 6), 6)):
        told = json.loads(surgeon("verify", *words, "--json", "-C", root).stdout)
        assert (told["run"], told["step"], told["against"]) == (str(root), 8, against)


def test_one_sentence_is_one_row_whatever_it_is_said_of(surgeon: Surgeon, trained: Trained) -> None:
    """After a reset the same is said of every parameter. The document has each of them."""
    root = trained()
    surgeon("reset", "moments", "--yes", "-C", root)
    surgeon("scale", "final_layernorm.weight", "--by", 1e6, "--yes", "-C", root)
    told = surgeon("doctor", "--vitals", "-C", root)
    every = json.loads(surgeon("doctor", "--vitals", "--json", "-C", root).stdout)["vitals"]
    said = Counter(item["what"] for item in every["observations"])
    assert len(said) > 1 and max(said.values()) > 10
    rows = [line for line in told.stdout.splitlines() if any(what in line for what in said)]
    assert len(rows) == len(said)
    for what, number in said.items():
        (row,) = [line for line in rows if what in line]
        others = re.findall(r" and (\d+) others?\b", row)
        assert sum(map(int, others)) == number - 1, row
    assert "more: --json has all" not in told.stdout


def test_the_growth_of_norms_is_torchs(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    now, before = (weights(root, step) for step in (8, 4))
    told = surgeon("doctor", "--vitals", "--against", 4, "--json", "-C", root)
    assert told.exit_code == 0
    vitals = json.loads(told.stdout)["vitals"]
    assert vitals["against"] == 4
    growth = {item["parameter"]: item for item in vitals["growth"]}
    assert growth.keys() == now.keys() and len(now) > 10
    for name, item in growth.items():
        assert math.isclose(item["norm"], float(now[name].double().norm()), rel_tol=1e-6)
        assert math.isclose(item["before"], float(before[name].double().norm()), rel_tol=1e-6)
    times = [float(now[name].norm() / before[name].norm()) for name in growth]
    assert all(a >= b - 1e-6 for a, b in pairwise(times))
    text = surgeon("doctor", "--vitals", "--against", 4, "-C", root).stdout
    assert "norms of the weights since step 4, the most grown first:" in text
    assert f"half of {sum('bias' not in name for name in now)} parameters grew" in text


def weights(root: Path, step: int) -> dict[str, torch.Tensor]:
    (file,) = (root / f"global_step{step}").glob("mp_rank_00_model_states.pt")
    return {k: v for k, v in load_shard(file)["module"].items() if isinstance(v, torch.Tensor)}


def test_a_norm_that_doubled_is_unusual(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    surgeon("scale", "lm_head|word_embeddings", "--by", "2.5", "--yes", "-C", root)
    told = surgeon("doctor", "--vitals", "--against", 6, "--json", "-C", root)
    found = json.loads(told.stdout)["vitals"]["observations"]
    assert [item["parameter"] for item in found if item["kind"] == "norm-growth"] == [
        "word_embeddings.weight"
    ]
    assert json.loads(told.stdout)["vitals"]["growth"][0]["parameter"] == "word_embeddings.weight"


def test_logits_that_grew_are_said(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    surgeon("scale", "layers.1.query_key_value.weight", "--by", "30", "--yes", "-C", root)
    told = surgeon("doctor", "--vitals", "--against", 6, "--json", "-C", root)
    vitals = json.loads(told.stdout)["vitals"]
    top, other = vitals["attention"]
    assert (top["layer"], other["layer"], top["heads"]) == ("layers.1", "layers.0", 2)
    assert top["before"] * 600 < top["rms"] <= top["bound"]
    assert other["before"] < 2 * other["rms"]
    unusual = [item for item in vitals["observations"] if item["kind"] == "attention-logits"]
    assert [item["parameter"] for item in unusual] == ["layers.1"]
    text = surgeon("doctor", "--vitals", "-C", root).stdout
    assert f"attention logits estimated from the weights: RMS {top['rms']:.3g} in layers.1" in text


def test_what_is_said_of_each_kind_of_observation_works_when_typed(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    table = (REPO / "docs" / "vitals.md").read_text().partition("## Observations")[2]
    cells = re.findall(r"^\| (`.*?) \|", table.partition("## What is caught")[0], re.MULTILINE)
    kinds = [kind for cell in cells for kind in re.findall(r"`([\w-]+)`", cell)]
    assert len(kinds) > 10
    hints = [
        advice(kind, 8, against, older)
        for kind in kinds
        for against, older in ((None, None), (None, 6), (6, 6))
    ]
    for words in {hint.words for hint in hints if isinstance(hint, Command)}:
        done = surgeon(*words, "-C", root)
        assert done.exit_code in (0, 4), (words, done.output)
    surgeon("scale", "layers.1.query_key_value.weight", "--by", "30", "--yes", "-C", root)
    made = json.loads(surgeon("doctor", "--vitals", "--json", "-C", root).stdout)["vitals"]
    assert made["observations"] and all(item["next"] for item in made["observations"])


def test_growth_is_since_an_earlier_saved_step(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    for words, said in (
        (("--vitals", "--against", 7), "step 7 is not saved"),
        (("--vitals", "--against", 8), "not before step 8"),
        (("--against", 4), "--against belongs to --vitals"),
    ):
        refused = surgeon("doctor", *words, "-C", root)
        assert refused.exit_code == 2 and said in refused.stderr


def test_a_step_is_compared_with_an_earlier_one_by_the_hint(
    surgeon: Surgeon, trained: Trained
) -> None:
    """Each hint is a command that works: of the latest with itself, of an earlier with a later."""
    root = trained()
    for words, hint in (
        (("--against", 8), ["verify", "8", "--after", "6"]),
        ((4, "--against", 6), ["verify", "6", "--after", "4"]),
        ((2, "--against", 2), ["verify", "2"]),
    ):
        refused = surgeon("verify", *words, "-C", root)
        assert refused.exit_code == 2 and "is not before step" in refused.stderr
        (found,) = hints(refused.stderr)
        assert found == ["-C", str(root), *hint]
        done = surgeon(*found)
        assert done.exit_code == 0, done.output
