"""doctor --vitals and verify --against as they are typed, also on what is damaged."""

from __future__ import annotations

import json
import math

import torch

from tests.cli.conftest import Surgeon
from tests.conftest import Trained
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
    assert told.exit_code == 0 and "level 4" in told.stdout
    for words, said in (((7,), "step 7 is not saved"), ((8,), "not before step 8")):
        refused = surgeon("verify", "--against", *words, "-C", root)
        assert refused.exit_code == 2 and said in refused.stderr
