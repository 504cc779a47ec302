"""diff as it is typed: sides, exit codes, the document, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Surgeon, hints
from tests.conftest import Trained
from tests.support.tiny_run import make_run

OPTIM = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def test_the_command_line(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    assert surgeon("diff", 8, "global_step8", "-C", root).exit_code == 0
    assert surgeon("diff", f"{root}:6", root).exit_code == 3
    told = surgeon("diff", 6, "latest", "--tensors", "-C", root)
    assert told.exit_code == 3 and "exp_avg" in told.stdout
    document = json.loads(surgeon("diff", 6, 8, "--json", "-C", root).stdout)
    assert not document["same"] and document["tensors"] is None
    assert {"file", "field", "path", "old", "new"} <= document["changes"][0].keys()
    for words, code, said in (
        (("diff", 8), 2, "two steps or runs"),
        (("diff", 8, 6, "--receipt", 1), 2, "two steps or runs"),
        (("diff", 8, 7), 2, "step 7 is not saved"),
        (("diff", 8, "nowhere"), 2, "'nowhere' is not a step"),
        (("diff", "--receipt", 1), 2, "no receipt 0001"),
        (("diff", "--receipt", "last"), 2, "no receipt last\n"),
    ):
        refused = surgeon(*words, "-C", root)
        assert refused.exit_code == code and said in refused.stderr
    near = surgeon("diff", 6, 7, "-C", root).stderr
    assert "ckptsurgeon diff 6 8 " in near and "diff 6 6" not in near
    (root / "global_step6" / OPTIM).unlink()
    refused = surgeon("diff", 8, 6, "-C", root)
    assert refused.exit_code == 1 and f"missing: {OPTIM}" in refused.stderr


def test_one_word_alone_leads_to_a_comparison_that_works(surgeon: Surgeon, tmp_path: Path) -> None:
    """A step, the newest one, or a surgery."""
    root = make_run(tmp_path / "run", (2, 4))
    assert surgeon("set", "beta2=0.9", "-yq", "-C", root).exit_code == 0
    for word in ("2", "4", "latest", "0001"):
        refused = surgeon("diff", word, "-C", root)
        assert refused.exit_code == 2
        assert surgeon(*hints(refused.stderr)[0]).exit_code == 3, word
