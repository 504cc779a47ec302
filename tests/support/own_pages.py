"""Trainers of their own that save what a page describes: a step in a file or in two, beside the
last one or over it."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from ckptsurgeon import Run
from tests.support.tiny_run import LAMBDA_LR

CONTENT = (
    "{optimizers: [[optimizer]], schedulers: [[scheduler]], fields: {iteration: [[iter_num]]}}"
)
PAGES: Mapping[str, tuple[str, str]] = {
    "one file, its step inside": (
        f'name: own\nnumber: [iter_num]\nfiles:\n  "ckpt.pt": {CONTENT}\n',
        "ckpt.pt",
    ),
    "files of any name, the step inside": (
        f'name: own\nnumber: [iter_num]\nfiles:\n  "at-*.pt": {CONTENT}\n',
        "at-{step}.pt",
    ),
    "folders of any name, the step inside": (
        'name: own\nnumber: {folder: "save-*", file: all.pt, keys: [iter_num]}\n'
        f'files:\n  "save-*/all.pt": {CONTENT}\n',
        "save-{step}/all.pt",
    ),
    "files, a pointer and a copy": (
        f'name: own\npointer: {{file: latest.txt, text: "{{step}}"}}\nlast: [last.pt]\n'
        f'files:\n  "ckpt_{{step}}.pt": {CONTENT}\n',
        "ckpt_{step}.pt",
    ),
    "folders and a pointer": (
        f'name: own\npointer: {{file: latest.txt, text: "{{step}}"}}\n'
        f'files:\n  "step-{{step}}/all.pt": {CONTENT}\n',
        "step-{step}/all.pt",
    ),
    "folders of two files": (
        f'name: own\nfiles:\n  "step-{{step}}/optim.pt": {CONTENT}\n'
        '  "step-{step}/model.pt": {weights: [[model]]}\n',
        "step-{step}/optim.pt",
    ),
}


class Trainer:
    """Saves what a page describes, as torch.save does now or did until 1.6. Every file of a save
    has its `mark`. By `also` the page names more fields that are the same key as the iteration."""

    def __init__(self, root: Path, page: str, *, zipped: bool, also: Collection[str] = ()) -> None:
        self.root, self.zipped = root, zipped
        self.page, self.path = PAGES[page]
        fields = ", ".join(f"{name}: [[iter_num]]" for name in ("iteration", *sorted(also)))
        self.page = self.page.replace("iteration: [[iter_num]]", fields)
        self.saves = 0
        root.mkdir()
        (root / "own.yaml").write_text(self.page)
        (root / "ckptsurgeon.yaml").write_text("format: own.yaml")

    def save(self, step: int) -> None:
        moments = {name: torch.full((3,), float(step)) for name in ("exp_avg", "exp_avg_sq")}
        group = {
            "lr": 1e-3, "initial_lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8,
            "weight_decay": 0.1, "amsgrad": False, "params": [0],
        }  # fmt: skip
        self.saves += 1
        state = {
            "iter_num": step,
            "mark": self.mark(self.saves),
            "optimizer": {
                "state": {0: {"step": torch.tensor(float(step)), **moments}},
                "param_groups": [group],
            },
            "scheduler": {**LAMBDA_LR, "last_epoch": step, "_step_count": step + 1},
        }
        path = self.root / self.path.replace("{step}", str(step))
        path.parent.mkdir(exist_ok=True)
        torch.save(state, path, _use_new_zipfile_serialization=self.zipped)
        if "model.pt" in self.page:
            model = {"model": {"w": torch.full((3,), float(step))}, "mark": state["mark"]}
            file = path.with_name("model.pt")
            torch.save(model, file, _use_new_zipfile_serialization=self.zipped)
        if "pointer:" in self.page:
            (self.root / "latest.txt").write_text(str(step))
        if "last:" in self.page:
            shutil.copyfile(path, self.root / "last.pt")

    def mark(self, save: int) -> str:
        """What stands in each file of that save, the first is 1."""
        return f"mark-{save:03d}-"

    def marks(self, path: Path) -> set[str]:
        """Of which saves a file, or what is in a folder, is."""
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        content = b"".join(file.read_bytes() for file in files if ".pt" in file.suffixes)
        return {m for m in map(self.mark, range(1, self.saves + 1)) if m.encode() in content}

    def run(self) -> Run:
        return Run.open(self.root)
