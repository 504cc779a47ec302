"""What becomes of each operation on each format: the table in docs/formats.md comes from here.

`python -m tests.formats.matrix` writes it anew.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from tests.support import (
    claims,
    deepspeed_engine,
    fairseq_files,
    megatron_bridge,
    megatron_dist,
    megatron_engine,
    megatron_flat,
    megatron_legacy,
    nanotron_files,
    nemo_files,
)
from tests.support.dcp_trainers import CONFIG, Trainer, olmo, torchtitan
from tests.support.in_process import one_rank
from tests.support.launch import REPO, launch
from tests.support.tiny_attention import HIDDEN, LLAMA, LLAMA_NAMES, MEGATRON, OLMO, Layered
from tests.support.universal import convert

DOCUMENT = REPO / "docs" / "formats.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

Maker = Callable[[Path], object]
TRAINER_STATE = {"max_steps": 100, "train_batch_size": 64}
"""Of what Hugging Face's Trainer keeps beside its step."""


def _deepspeed(stage: int, **more: Any) -> Maker:
    def make(root: Path) -> None:
        options = deepspeed_engine.Options(stage=stage, scheduler="LambdaLR", **more)
        for steps in (4, 6):
            deepspeed_engine.make(root, options, steps)

    return make


def _megatron_deepspeed(root: Path) -> None:
    with megatron_engine.megatron():
        megatron_engine.make(root, **MEGATRON)


def _bundled(root: Path) -> None:
    from train.prepare_data import prepare_data

    prefix = root.parent / "corpus"
    prepare_data(str(prefix), "byte", [], True)
    words = (f"save={root}", f"data={prefix}", "train_iters=4", "save_interval=2")
    launch("--config=train/configs/tiny.yaml", "--from-scratch", *words)


def _torch_dcp(root: Path) -> None:
    megatron_flat.save(root, named=False, **MEGATRON)


def _universal(root: Path) -> None:
    _deepspeed(1)(root)
    convert(root, 4)
    convert(root)
    (root / "latest_universal").write_text("global_step6_universal")
    (root / "latest").write_text("global_step6_universal")


def hugging_face(root: Path) -> None:
    model = Layered(LLAMA_NAMES, layers=1)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / 100)
    for step in range(1, 5):
        adam.zero_grad()
        model(torch.rand(3, HIDDEN)).pow(2).sum().backward()
        adam.step()
        schedule.step()
        if step % 2 == 0:
            folder = root / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            save_file(model.state_dict(), folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps(LLAMA))
            torch.save(adam.state_dict(), folder / "optimizer.pt")
            torch.save(schedule.state_dict(), folder / "scheduler.pt")
            (folder / "trainer_state.json").write_text(
                json.dumps(TRAINER_STATE | {"global_step": step})
            )


def _fsdp2(root: Path) -> None:
    """The Trainer's folders, with one rank's shards under the names of `save_fsdp_optimizer`."""
    trainer = Trainer(heads=LLAMA_NAMES)
    for step in (2, 4):
        for _ in range(2):
            trainer.update()
        folder = root / f"checkpoint-{step}"
        optimizer = get_optimizer_state_dict(trainer.model, trainer.optimizer)
        for name, state in (
            ("optimizer_0", {"optimizer": optimizer}),
            ("pytorch_model_fsdp_0", {"model": trainer.model.state_dict()}),
        ):
            dcp.save(state, checkpoint_id=folder / name, no_dist=True)
        torch.save(trainer.schedule.state_dict(), folder / "scheduler.pt")
        (folder / "config.json").write_text(json.dumps(LLAMA))
        (folder / "trainer_state.json").write_text(
            json.dumps(TRAINER_STATE | {"global_step": step})
        )


def _olmo(root: Path) -> None:
    olmo(root, config={**CONFIG, "model": OLMO}, heads=True)


def _olmo_without_scheduler(root: Path) -> None:
    module = {k: v for k, v in CONFIG["train_module"].items() if k != "scheduler"}
    olmo(root, config={**CONFIG, "model": OLMO, "train_module": module}, heads=True)


def _olmo_ddp(root: Path) -> None:
    olmo(root, config={**CONFIG, "model": OLMO}, ddp=True, heads=True)


FORMATS: dict[str, Maker] = {
    "bundled trainer": _bundled,
    "DeepSpeed ZeRO 0": _deepspeed(0),
    "DeepSpeed ZeRO 1": _deepspeed(1),
    "DeepSpeed ZeRO 3": _deepspeed(3),
    "DeepSpeed ZeRO 1, fp16": _deepspeed(1, dtype="fp16"),
    "DeepSpeed universal": _universal,
    "Megatron-DeepSpeed": _megatron_deepspeed,
    "Megatron-LM legacy": partial(megatron_legacy.save, **MEGATRON),
    "Megatron-LM torch_dist": partial(megatron_dist.save, **MEGATRON),
    "Megatron-LM torch_dcp": _torch_dcp,
    "Megatron-LM fsdp_dtensor": partial(megatron_flat.save, **MEGATRON),
    "Megatron-Bridge": megatron_bridge.save,
    "NeMo 2": nemo_files.make,
    "torchtitan (DCP)": torchtitan,
    "OLMo-core": _olmo,
    "OLMo-core, no scheduler": _olmo_without_scheduler,
    "OLMo-core, OLMoDDP": _olmo_ddp,
    "metaseq, fairseq": fairseq_files.make_run,
    "nanotron": partial(nanotron_files.make, names=nanotron_files.ATTENTION),
    "FSDP2 (Accelerate, Trainer)": _fsdp2,
    "Hugging Face": hugging_face,
}
"""Format → how a run of at least two steps is made."""

OPERATIONS: dict[str, Mapping[str, Any]] = {
    "rollback": {"rollback": {"to": "FIRST"}},
    "repair-latest": {"rollback": None, "repair_latest": {"to": "FIRST"}},
    "set-lr": {"set": {"lr": "0.5x"}},
    "set betas": {"set": {"beta1": 0.8, "beta2": 0.9}},
    "set eps": {"set": {"eps": 1e-6}},
    "set weight_decay": {"set": {"weight_decay": 0.3}},
    "set clip_grad": {"set": {"clip_grad": 0.25}},
    "set loss_scale": {"set": {"loss_scale": 256}},
    "set seed": {"set": {"seed": 4321}},
    "set consumed_samples": {"set": {"consumed_samples": 123}},
    "set tokens": {"set": {"tokens": 321}},
    "set iteration": {"set": {"iteration": 100}},
    "set batch_size": {"set": {"batch_size": 32}},
    "set rampup": {"set": {"batch_size": 32, "rampup": [16, 16, 1000]}},
    "reset moments": {"reset": ["moments"]},
    "reset moments --only exp_avg": {"reset": ["moments"], "moments": {"only": "exp_avg"}},
    "reset moments --params": {"reset": ["moments"], "moments": {"params": "weight"}},
    "reset moments --rewarm": {"reset": ["moments"], "rewarm": {"iterations": 2}},
    "reset loss-scale": {"reset": ["loss_scale"]},
    "skip": {"skip": ["100-110"]},
    "skip --by-counters": {"skip": ["NEXT"], "skip_by_counters": True},
    "swap-optimizer": {"swap_optimizer": {"to": "sgdw"}},
    "sync-replicas": {"sync_replicas": {}},
    "set-lr --restart": {"rewarm_schedule": {"to": 3e-4, "warmup": 2, "decay": 4}},
    "cooldown": {"cooldown": {"steps": 2}},
    "cooldown --shape 1-sqrt": {"cooldown": {"steps": 2, "shape": "1-sqrt"}},
    "cooldown --shape cosine": {"cooldown": {"steps": 2, "shape": "cosine"}},
    "average": {"average": {"last": 2}},
    "average --moments average": {"average": {"last": 2, "moments": "average"}},
    "graft moments": {"graft": {"step": "FIRST"}},
    "graft moments --params": {"graft": {"step": "FIRST", "params": "weight"}},
    "clip_moments": {"clip_moments": {"above": 2}},
    "scale": {"scale": {"params": "weight", "by": 0.9}},
    "scale --qk-clip": {"scale": {"qk_clip": {"threshold": 0.01}}},
    "precision bf16": {"precision": {"to": "bf16"}},
    "precision fp32": {"precision": {"to": "fp32"}},
    "scale --moments scale": {"scale": {"params": "weight", "by": 0.9, "moments": "scale"}},
}


def words_of(root: Path) -> Mapping[str, Any]:
    """What FIRST and NEXT stand for in the operations on this run."""
    run = Run.open(root)
    return {"FIRST": run.steps()[0], "NEXT": str(run.checkpoint(run.latest()).state().step + 1)}


def outcome(root: Path, name: str, words: Mapping[str, Any]) -> Plan | SurgeryError:
    """The plan of one operation on this run, or the refusal."""
    run = Run.open(root)
    recipe = _filled(OPERATIONS[name], words)
    try:
        return surgery.plan(run, from_data(recipe))
    except SurgeryError as error:
        return _general(error, run)


def outcomes(root: Path) -> dict[str, Plan | SurgeryError]:
    """What each operation of the table comes to on this run."""
    words = words_of(root)
    return {name: outcome(root, name, words) for name in OPERATIONS}


def _general(error: SurgeryError, run: Run) -> SurgeryError:
    """The refusal with `the checkpoint` for the name that it has here."""
    checkpoint = run.checkpoint(run.latest())
    what = error.what
    for path in (*sorted(checkpoint.archives, reverse=True), checkpoint.path):
        what = re.sub(rf"(?<!\w){re.escape(path.name)}(?!\w)", "the checkpoint", what)
    return SurgeryError(what, next=error.next)


def _filled(value: Any, words: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(item, words) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_filled(item, words) for item in value]
    return words.get(value, value) if isinstance(value, str) else value


def make(name: str, root: Path) -> Path:
    """A run of this format."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with one_rank():
        FORMATS[name](root)
    return root


def table(outcomes: Mapping[str, Mapping[str, Plan | SurgeryError]]) -> str:
    """Operations down, formats across; a refusal is a number, and its reason is below. A yes has
    the letter of how it is known, and below stands by which test or source."""
    notes: dict[str, int] = {}
    known = {(w.column, row): w.how for w in _by_rank() for row in w.rows}
    head = f"| | {' | '.join(outcomes)} |"
    lines = [head, "|---" * (len(outcomes) + 1) + "|"]
    for operation in OPERATIONS:
        cells = [
            _cell(outcomes[name][operation], notes, known.get((name, operation), claims.READ))
            for name in outcomes
        ]
        lines.append(f"| {operation} | {' | '.join(cells)} |")
    lines += ["", *_knowledge(outcomes), ""]
    lines += [f"{number}. {text}" for text, number in notes.items()]
    return "\n".join(lines)


def _by_rank() -> list[claims.Witness]:
    """The witnesses, those that loaded last: their word counts most."""
    return sorted(claims.witnesses(), key=lambda each: each.how == claims.LOADED)


def _knowledge(columns: Iterable[str]) -> list[str]:
    """Of each column, who says so: libraries with their versions, and the source for the rest."""
    every = _by_rank()
    lines = []
    for column in columns:
        tests: dict[tuple[str, str], list[str]] = {}
        for each in every:
            if each.column == column:
                tests.setdefault((each.how, each.library), []).append(each.test)
        words = {claims.LOADED: "loaded by", claims.COMPUTED: "computed by a function of"}
        parts = [
            f"**{how}** {words[how]} {library.removeprefix(claims.NEWEST)} "
            f"{claims.version(library)} "
            f"(`{'`, `'.join(dict.fromkeys(test.partition('::')[0] for test in named))}`)"
            for (how, library), named in sorted(tests.items(), reverse=True)
        ]
        file, commit = claims.SOURCES[column]
        lines.append(f"- {column}: {'; '.join([*parts, f'**S** read in `{file}`, {commit}'])}")
    return lines


def _cell(found: Plan | SurgeryError, notes: dict[str, int], known: str) -> str:
    if isinstance(found, SurgeryError):
        advice = " / ".join(" ".join(hint.split()) for hint in found.next)
        text = f"{found.what}. Instead: `{advice}`"
        return f"refused [{notes.setdefault(text, len(notes) + 1)}]"
    return "nothing to do" if found.empty else f"yes {known}"


def written(text: str, inner: str) -> str:
    """The document with `inner` between its two marks."""
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n{inner}\n{END}{tail}"


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        inner = table(
            {name: outcomes(make(name, folder / str(i) / "run")) for i, name in enumerate(FORMATS)}
        )
    finally:
        shutil.rmtree(folder)
    DOCUMENT.write_text(written(DOCUMENT.read_text("utf-8"), inner), "utf-8")


if __name__ == "__main__":
    main()
