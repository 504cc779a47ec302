"""Steps of Hugging Face's Trainer out of any tensors, and transplants between them by a page."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ckptsurgeon import Run, apply, plan
from ckptsurgeon.recipe.file import from_data
from tests.support.tiny_run import GROUP, LAMBDA_LR

Tensors = dict[str, torch.Tensor]


def saved(root: Path, step: int, models: list[Tensors], config: dict[str, object]) -> Path:
    """A step of a Trainer: weights and two moments, which are the three models; `config` is what
    transformers saves of the model."""
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    weights, first, second = models
    save_file(weights, folder / "model.safetensors")
    states = {
        number: {"step": torch.tensor(float(step)), "exp_avg": first[name],
                 "exp_avg_sq": second[name]}
        for number, name in enumerate(weights)
    }  # fmt: skip
    adam = {"state": states, "param_groups": [{**GROUP, "params": [*range(len(weights))]}]}
    torch.save(adam, folder / "optimizer.pt")
    torch.save({**LAMBDA_LR, "last_epoch": step, "_step_count": step + 1}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (folder / "config.json").write_text(json.dumps(config))
    (root / "order.txt").write_text("\n".join(weights))
    return root


def filled(run: Path, source: Path, page: str) -> list[Tensors]:
    """The run, transplanted into by this page: its weights and moments."""
    names = [(root / "order.txt").read_text().split("\n") for root in (run, source)]
    order = run.parent / "order.txt"
    order.write_text("\n".join(names[0] + names[1]))  # both number theirs
    section = {"source": str(source), "names": page, "order": str(order)}
    opened = Run.open(run)
    made = plan(opened, from_data({"transplant": section}))
    assert not made.warnings
    apply(opened, made)
    (step,) = run.glob("checkpoint-*")
    states = torch.load(step / "optimizer.pt")["state"]
    moments = [
        {name: states[i][kind] for i, name in enumerate(names[0])}
        for kind in ("exp_avg", "exp_avg_sq")
    ]
    return [load_file(step / "model.safetensors"), *moments]


def same(found: list[Tensors], wanted: list[Tensors]) -> bool:
    """Bit for bit, under the same names."""
    return all(
        one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
        for one, two in zip(found, wanted, strict=True)
    )
