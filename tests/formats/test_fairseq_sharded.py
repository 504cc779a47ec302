"""fairseq with FSDP on two ranks: its command line (tests.support.fairseq_trainer) saves, and
resumes what was edited."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import look, surgery
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.fairseq_runs import NEEDED, SETTINGS, document, names, rate, train, twin
from tests.support.newest_megatron import beside
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    *NEEDED,
    pytest.mark.skipif(
        not (beside("fairseq") / "fairscale").is_dir(), reason="make test-formats installs it"
    ),
]
GATHERED = """--ddp-backend fully_sharded --distributed-backend gloo --min-params-to-wrap 0
    --no-epoch-checkpoints --decoder-ffn-embed-dim 30"""
SHARDED = f"{GATHERED} --use-sharded-state".replace("--no-epoch-checkpoints ", "")
"""30 rows: what is left of a layer is odd, and the second rank's piece ends in padding."""
HALF = "--fp16 --fp16-init-scale 4"
"""With weights of 16 bits alone fairscale refuses this release of fairseq."""
LAST = [f"checkpoint_last-shard{rank}.pt" for rank in range(2)]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of ten updates on two ranks, trained once, by its flags."""
    made: dict[str, Path] = {}

    def make(words: str) -> Path:
        if words not in made:
            made[words] = root = tmp_path_factory.mktemp("sharded") / "run"
            used = train(root, 10, words, ranks=2)
            (root.parent / "used.json").write_text(json.dumps(used))
        return made[words]

    return make


@pytest.fixture
def run(originals: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(words: str) -> Path:
        shutil.copy(originals(words).parent / "used.json", tmp_path)
        return Path(shutil.copytree(originals(words), tmp_path / "run"))

    return copy


def sums(root: Path, file: str) -> float:
    """Of all that the first rank trains."""
    model = document(root, file)["model"]
    return sum(float(t.double().sum()) for name, t in model.items() if "flat_param" in name)


def whole(root: Path) -> dict[str, torch.Tensor]:
    """The weights of the latest step, as fairscale puts the pieces together."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    saved = [document(root, name) for name in LAST]
    pieces = [each["model"] for each in saved], [each["fsdp_metadata"] for each in saved]
    return dict(FullyShardedDataParallel.consolidate_shard_weights(*pieces))


@pytest.mark.witness(
    "metaseq, fairseq", "rollback", "set betas", "set eps", "set weight_decay", by="fairseq"
)
@pytest.mark.parametrize("words", [SHARDED, GATHERED])
def test_the_promise_is_what_the_next_update_uses(run: Callable[[str], Path], words: str) -> None:
    root = run(words)
    before, opened = snapshot(root), Run.open(root)
    assert (opened.format.name, opened.latest()) == ("fairseq", 10)
    assert look.verify(opened, level=4).findings == ()
    plan = operate(root, {"rollback": {"to": 6}, "set": SETTINGS})
    assert plan.promise is not None and plan.promise.asked and plan.promise.adam_step == 6
    used = train(twin(root), 8, f"{words} --adam-eps 1e-3 --weight-decay 0.9", ranks=2)
    assert sorted(used) == [7, 8]
    for update in used.values():
        assert (update["betas"], update["eps"]) == ([[0.9, 0.98]], [1e-6])
        assert update["weight_decay"] == [0.3]
    assert used[7]["adam_step"] == 6
    assert used[7]["lr"] == [pytest.approx(rate(6), rel=1e-12)]
    take_back(root, before)


@pytest.mark.parametrize("words", [SHARDED, f"{SHARDED} {HALF}"])
def test_a_rollback_alone_is_followed_by_the_same_run(
    run: Callable[[str], Path], words: str
) -> None:
    root = run(words)
    first = json.loads((root.parent / "used.json").read_text())
    old, ends = names(root), [document(root, name) for name in LAST]
    operate(root, {"rollback": {"to": 6}})
    assert train(root, 10, words, ranks=2) == {step: first[str(step)] for step in range(7, 11)}
    assert names(root) == old
    for name, end in zip(LAST, ends, strict=True):
        for key, tensor in document(root, name)["model"].items():
            assert torch.equal(tensor, end["model"][key]) or key.endswith("_float_tensor")  # unset


@pytest.mark.witness("metaseq, fairseq", "reset moments", "graft moments", by="fairseq")
@pytest.mark.parametrize("words", [SHARDED, GATHERED])
def test_moments_are_what_the_next_update_begins_with(
    run: Callable[[str], Path], words: str
) -> None:
    root = run(words)
    before = snapshot(root)
    operate(root, {"reset": ["moments"]})
    used = train(twin(root), 11, words, ranks=2)[11]
    assert (used["adam_step"], used["moments"]) == (0, 0)
    take_back(root, before)
    kept = twin(root)
    operate(kept, {"rollback": {"to": 6}})
    wanted = train(kept, 7, words, ranks=2)[7]["moments"]
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data({"graft": {"step": 6}})))
    used = train(twin(root), 11, words, ranks=2)[11]
    assert (used["adam_step"], used["moments"]) == (6, wanted)
    take_back(root, before)


@pytest.mark.witness("metaseq, fairseq", "set loss_scale", by="fairseq")
def test_the_loss_scale_is_the_checkpoints(run: Callable[[str], Path]) -> None:
    words = f"{SHARDED} {HALF}"
    root = run(words)
    operate(root, {"set": {"loss_scale": 16}})
    assert train(root, 11, words.replace("scale 4", "scale 2"), ranks=2)[11]["loss_scale"] == 16


@pytest.mark.witness("metaseq, fairseq", "scale", by="fairseq")
@pytest.mark.parametrize("name", ["decoder.embed_tokens.weight", "decoder.layers.0.fc1.weight"])
def test_a_parameter_of_a_flat_one_is_scaled_alone(
    run: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(beside("fairseq"))
    root = run(SHARDED)
    before, old = snapshot(root), whole(root)
    recipe: dict[str, Any] = {"scale": {"params": name, "by": 0.5}}
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data(recipe)))
    for key, tensor in whole(root).items():
        assert torch.equal(tensor, old[key] / 2 if key == name else old[key])
    used = train(twin(root), 11, SHARDED, ranks=2)[11]["sums"]
    assert sum(used.values()) == pytest.approx(sums(root, LAST[0]), rel=1e-9)
    take_back(root, before)
