"""New numbers are never made of NaN, nor too large for their dtype."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.transaction.arithmetic import spoilt
from tests.support.snapshot import snapshot

PAGE = """
name: mytrainer
files:
  "{step}.pt": {optimizers: [[optimizer]], weights: [[model]]}
"""


def run(root: Path, poison: float, *, moments: bool = False, dtype: Any = torch.float32) -> Run:
    """Steps 2, 4 and 6; in step 2 one number of the weights or of the moments is `poison`. A mask
    of infinities lies among the weights."""
    root.mkdir()
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(6, 5))
    adam = torch.optim.AdamW([weight], lr=1e-3)
    mask = torch.full((4,), -math.inf, dtype=dtype)
    for step in (2, 4, 6):
        weight.grad = torch.randn(6, 5)
        adam.step()
        optimizer = adam.state_dict()
        saved = {"weight": weight.detach().to(dtype, copy=True), "mask": mask}
        if step == 2:
            held = optimizer["state"][0]["exp_avg"] if moments else saved["weight"]
            old, held[1, 2] = held[1, 2].clone(), poison
        torch.save({"model": saved, "optimizer": optimizer}, root / f"{step}.pt")
        if step == 2 and moments:
            held[1, 2] = old
    (root / "page.yaml").write_text(PAGE)
    return Run.open(root, str(root / "page.yaml"))


def number(root: Path, refused: str, dtype: Any) -> float:
    """What stands at the byte that a refusal names."""
    found = re.match(r"(\S+): byte (\d+): NaN or infinite", refused)
    assert found is not None, refused
    item = torch.empty(0, dtype=dtype).element_size()
    data = bytearray((root / found[1]).read_bytes()[int(found[2]) :][:item])
    return float(torch.frombuffer(data, dtype=dtype))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_average_with_nan_is_refused(tmp_path: Path, poison: float, dtype: Any) -> None:
    made = run(tmp_path / "run", poison, dtype=dtype)
    before = snapshot(made.root)
    with pytest.raises(SurgeryError, match=r"^2\.pt: byte \d+: NaN or") as refused:
        surgery.apply(made, surgery.plan(made, from_data({"average": {"last": 3}})))
    assert "mean of steps 2, 4, 6" in refused.value.what
    assert repr(number(made.root, refused.value.what, dtype)) == repr(poison)
    assert refused.value.untouched == "the run is exactly as it was"
    assert snapshot(made.root) == before
    surgery.apply(made, surgery.plan(made, from_data({"average": {"last": 2}})))
    saved = torch.load(made.root / "6.pt", weights_only=False)["model"]
    assert saved["weight"].isfinite().all() and (saved["mask"] == -math.inf).all()


def test_an_average_of_other_shapes_tells_both(tmp_path: Path) -> None:
    made = run(tmp_path / "run", 1.0)
    saved = torch.load(made.root / "2.pt", weights_only=False)
    saved["model"]["weight"] = torch.zeros(7)
    torch.save(saved, made.root / "2.pt")
    with pytest.raises(SurgeryError, match=r"float32 \[6, 5\] in 6, weights float32 \[7\] in 2"):
        surgery.plan(made, from_data({"average": {"last": 3}}))
    del saved["model"]["weight"]
    torch.save(saved, made.root / "2.pt")
    with pytest.raises(SurgeryError, match=r"weights float32 \[6, 5\] in 6, absent in 2"):
        surgery.plan(made, from_data({"average": {"last": 3}}))


def test_a_graft_of_nan_is_refused(tmp_path: Path) -> None:
    made = run(tmp_path / "run", math.nan, moments=True)
    before = snapshot(made.root)
    with pytest.raises(SurgeryError, match=r"^2\.pt: .* NaN .*as at step 2") as refused:
        surgery.apply(made, surgery.plan(made, from_data({"graft": {"step": 2}})))
    assert math.isnan(number(made.root, refused.value.what, torch.float32))
    assert snapshot(made.root) == before
    surgery.apply(made, surgery.plan(made, from_data({"graft": {"step": 4}})))


def test_a_product_that_overflows_is_refused(tmp_path: Path) -> None:
    made = run(tmp_path / "run", 1.0, dtype=torch.float16)
    before = snapshot(made.root)
    with pytest.raises(SurgeryError, match="would be too large for float16"):
        scaled = {"scale": {"params": "weight", "by": 1e6}}
        surgery.apply(made, surgery.plan(made, from_data(scaled)))
    assert snapshot(made.root) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_every_term_has_is_not_spoilt(dtype: Any) -> None:
    def held(*numbers: float) -> bytes:
        return bytes(torch.tensor(numbers, dtype=dtype).view(torch.uint8).numpy())

    name, inf = str(dtype).removeprefix("torch."), math.inf
    for new, terms, found in (
        (held(1, 2), [held(1, 2)], None),
        (held(1, -inf), [held(1, -inf), held(1, -inf)], None),
        (held(1, -inf), [held(1, 3), held(1, -inf)], (1, 1)),
        (held(1, inf), [held(1, 3), held(1, 4)], (1, -1)),
        (held(math.nan, 1), [held(math.nan, 1)], (0, 0)),
        (held(math.nan, 1), [held(-inf, 1), held(inf, 1)], (0, 0)),
    ):
        assert spoilt(new, name, terms, [name] * len(terms)) == found
    assert spoilt(b"\xff", "uint8", [b"\xff"], ["uint8"]) is None
