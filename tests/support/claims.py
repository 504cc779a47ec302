"""How each cell of docs/formats.md is known: by a test that names it, or by a source.

`@pytest.mark.witness(COLUMN, ROW, …, by=LIBRARY)` says that the test carries out these operations
on a run of that format and asks that library. It is held to it (tests/conftest.py): the operations
must be applied while the test runs, and its module or what it starts must import the library.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.launch import REPO

LOADED, COMPUTED, READ = "L", "C", "S"
PINS = [
    "constraints.txt", "constraints-sources.txt", "constraints-fairseq.txt",
    "constraints-nanotron.txt",
]  # fmt: skip
NEWEST = "newest "
"""Before the name of a library that is installed beside the environment."""
IMPORTS = {
    "ai2-olmo-core": "olmo_core", "megatron-core": "megatron", f"{NEWEST}megatron-core": "megatron",
    "megatron-bridge": r"megatron\.bridge", "nemo_toolkit": "nemo",
}  # fmt: skip
"""Library → the package that it installs, where the names differ."""
SOURCES = {
    "bundled trainer": ("train/checkpoint.py", "this repository"),
    "DeepSpeed ZeRO 0": ("deepspeed/runtime/engine.py", "deepspeed edaa7221"),
    "DeepSpeed ZeRO 1": ("deepspeed/runtime/zero/stage_1_and_2.py", "deepspeed edaa7221"),
    "DeepSpeed ZeRO 3": ("deepspeed/runtime/zero/stage3.py", "deepspeed edaa7221"),
    "DeepSpeed ZeRO 1, fp16": ("deepspeed/runtime/zero/stage_1_and_2.py", "deepspeed edaa7221"),
    "DeepSpeed universal": ("deepspeed/checkpoint/universal_checkpoint.py", "deepspeed edaa7221"),
    "Megatron-DeepSpeed": ("megatron/checkpointing.py", "bigscience Megatron-DeepSpeed 8387ae17"),
    "Megatron-LM legacy": ("megatron/training/checkpointing.py", "Megatron-LM d98e8a64"),
    "Megatron-LM torch_dist": ("megatron/training/checkpointing.py", "Megatron-LM d98e8a64"),
    "Megatron-LM torch_dcp": ("megatron/training/checkpointing.py", "Megatron-LM d98e8a64"),
    "Megatron-LM fsdp_dtensor": (
        "megatron/core/optimizer/distrib_optimizer.py",
        "Megatron-LM d98e8a64",
    ),
    "Megatron-Bridge": ("training/{checkpointing,state,config}.py", "megatron-bridge 0.6.2"),
    "NeMo 2": (
        "nemo/lightning/{io/pl,pytorch/strategies/megatron_strategy,pytorch/optim/*}.py, "
        "nemo/core/optim/lr_scheduler.py",
        "NeMo 2381f42",
    ),
    "torchtitan (DCP)": ("components/checkpointer/dcp.py", "torchtitan b5bcd76c"),
    "OLMo-core": ("train/{trainer,checkpoint}.py", "OLMo-core 3.0.0"),
    "OLMo-core, no scheduler": ("train/{trainer,checkpoint}.py", "OLMo-core 3.0.0"),
    "OLMo-core, OLMoDDP": ("optim/moe_optimizer.py", "OLMo-core 3.0.0"),
    "metaseq, fairseq": ("metaseq/trainer.py", "metaseq f7ffa5f"),
    "nanotron": ("nanotron/serialize/{optimizer,metadata}.py", "nanotron 2411b022"),
    "FSDP2 (Accelerate, Trainer)": ("accelerate/utils/fsdp_utils.py", "accelerate 1.15.0"),
    "Hugging Face": ("transformers/trainer.py", "transformers 5.23.0"),
}
"""Column → the file that was read for what no test asks a library about, and at which commit."""


class Witness(NamedTuple):
    """A test that says how some cells are known."""

    column: str
    rows: tuple[str, ...]
    library: str
    how: str
    test: str


@cache
def witnesses() -> tuple[Witness, ...]:
    """Those that the test modules name, from their text alone: nothing is imported or run."""
    return tuple(_named())


def _named() -> Iterator[Witness]:
    for path in sorted((REPO / "tests").rglob("test_*.py")):
        if "mark.witness(" not in path.read_text("utf-8"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.witness":
                    column, *rows = (ast.literal_eval(item) for item in mark.args)
                    named = {k.arg: ast.literal_eval(k.value) for k in mark.keywords if k.arg}
                    test = f"{path.relative_to(REPO)}::{node.name}"
                    how = str(named.get("how", LOADED))
                    yield Witness(column, tuple(rows), str(named["by"]), how, test)


def version(library: str) -> str:
    """The release that `make test-formats` installs."""
    newest = library.startswith(NEWEST)
    pins = ["constraints-newest-megatron.txt"] if newest else PINS
    name = re.escape(library.removeprefix(NEWEST))
    texts = (REPO.joinpath(file).read_text("utf-8") for file in pins)
    found = [match for text in texts if (match := re.search(rf"^{name}==(\S+)", text, re.M))]
    assert found, f"{' and '.join(pins)} do not pin {library}"
    return found[0][1]


def rows(recipe: Mapping[str, Any]) -> set[str]:
    """The rows of the table that a recipe carries out."""
    names: set[str] = set()
    if recipe.get("rollback"):
        names.add("rollback")
    if recipe.get("repair_latest") is not None:
        names.add("repair-latest")
    for key in recipe.get("set") or {}:
        name = {"lr": "set-lr", "beta1": "set betas", "beta2": "set betas"}.get(key, f"set {key}")
        names.add(name)
    reset, part = recipe.get("reset") or (), recipe.get("moments") or {}
    if "moments" in reset:
        only, params = part.get("only"), part.get("params")
        kind = " --only exp_avg" if only else " --params" if params else ""
        names.add(f"reset moments{kind}")
        if recipe.get("rewarm"):
            names.add("reset moments --rewarm")
    if "loss_scale" in reset:
        names.add("reset loss-scale")
    if recipe.get("skip"):
        names.add("skip --by-counters" if recipe.get("skip_by_counters") else "skip")
    if cooldown := recipe.get("cooldown"):
        shape = cooldown.get("shape")
        names.add(f"cooldown --shape {shape}" if shape else "cooldown")
    if recipe.get("rewarm_schedule"):
        names.add("set-lr --restart")
    for key in ("average", "scale"):
        if section := recipe.get(key):
            moments = section.get("moments")
            kind = f" --moments {moments}" if moments else ""
            names.add(f"{key} --qk-clip" if section.get("qk_clip") else f"{key}{kind}")
    if precision := recipe.get("precision"):
        names.add(f"precision {precision['to']}")
    if graft := recipe.get("graft"):
        names.add("graft moments --params" if graft.get("params") else "graft moments")
    others = ("swap_optimizer", "sync_replicas", "clip_moments")
    given = {key for key in others if recipe.get(key) is not None}
    return names | {key if key == "clip_moments" else key.replace("_", "-") for key in given}


def recorder(apply: Callable[..., Any], applied: set[str]) -> Callable[..., Any]:
    """`surgery.apply`, which notes in `applied` what it carries out."""

    def recorded(run: Any, plan: Any, *more: Any, **options: Any) -> Any:
        done = apply(run, plan, *more, **options)
        applied.update(rows(plan.recipe))
        return done

    return recorded


def asks(test: Path, library: str) -> bool:
    """Whether a test module, or the programs of tests/support that it names, import the library."""
    package = IMPORTS.get(library, library.replace("-", "_"))
    text = test.read_text("utf-8")
    support = {*re.findall(r"tests\.support\.(\w+)", text),
               *re.findall(r"from tests\.support import (\w+)", text)}  # fmt: skip
    if re.search(r"from tests\.support import \(", text):
        support |= {path.stem for path in (REPO / "tests" / "support").glob("*.py")}
    paths = [test, *(REPO / "tests" / "support" / f"{name}.py" for name in support)]
    if "launch" in support:  # the bundled trainer
        paths += (REPO / "train").glob("*.py")
    pattern = re.compile(rf"^\s*(?:from|import) {package}\b", re.M)
    return any(pattern.search(path.read_text("utf-8")) for path in paths if path.is_file())
