"""Pages that describe a trainer: those that come with ckptsurgeon, a user's own, and wrong ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import detect
from ckptsurgeon.formats.described.description import Description
from ckptsurgeon.recipe.file import from_data
from tests.support.described_runs import WALL_CLOCK, composer, stepped_cosine
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

OWN = """
name: mytrainer
files:
  "ckpt/{step}/optim_{rank}_of_{world}.pt":
    optimizers: [[optim]]
    schedulers: [[sched]]
    fields: {consumed_samples: [[seen]]}
pointer: {file: latest.txt, text: "step {step}"}
options: {seed: "--data-seed {value}"}
"""


def own(root: Path) -> Path:
    """A run of nobody's trainer, and the page that describes it."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    for step in (10, 20):
        folder = root / "ckpt" / str(step)
        folder.mkdir(parents=True)
        adam, schedule = stepped_cosine(model, step)
        for rank in range(2):
            saved = {"optim": adam.state_dict(), "sched": schedule.state_dict(), "seen": 8 * step}
            torch.save(saved, folder / f"optim_{rank}_of_2.pt")
    (root / "latest.txt").write_text("step 20")
    (root / "mytrainer.yaml").write_text(OWN)
    return root


def call(*words: object) -> Result:
    return CliRunner(env={"NO_COLOR": "1", "COLUMNS": "120"}).invoke(app, [str(w) for w in words])


def operate(run: Run, **recipe: Any) -> Any:
    plan = surgery.plan(run, from_data(recipe))
    surgery.apply(run, plan)
    return plan.promise


def test_a_rate_that_a_scheduler_elsewhere_makes_is_not_known(tmp_path: Path) -> None:
    """torch's LambdaLR goes on from its own base_lrs, which this format does not read: the first
    update has the new rate. Code that multiplies initial_lr has another at once."""

    def pair() -> tuple[Any, Any, Any]:
        weight = torch.nn.Parameter(torch.ones(2))
        adam = torch.optim.AdamW([weight], lr=1e-3)
        return weight, adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.9**step)

    weight, adam, schedule = pair()
    weight.grad = torch.ones(2)
    adam.step()
    schedule.step()
    file = tmp_path / "state_1.pt"
    torch.save({"optimizer": adam.state_dict(), "schedule": schedule.state_dict()}, file)
    format = "torch:state_{step}.pt=optimizer"
    assert look.inspect(Run.open(tmp_path, format)).scheduler == "an unknown schedule"
    promise = operate(Run.open(tmp_path, format), set={"lr": 5e-4})
    assert "what the next one uses is not known" in promise.not_known["lr"]
    weight, adam, schedule = pair()
    kept = torch.load(file, weights_only=False)
    adam.load_state_dict(kept["optimizer"])
    schedule.load_state_dict(kept["schedule"])
    assert adam.param_groups[0]["lr"] == promise.lr == 5e-4
    weight.grad = torch.ones(2)
    adam.step()
    schedule.step()
    assert adam.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.9**2)


def test_a_composer_run_goes_back_is_edited_and_is_undone(tmp_path: Path) -> None:
    root = composer(tmp_path / "run")
    before = snapshot(root)
    run = Run.open(root)
    assert (run.format.name, run.steps(), run.latest()) == ("composer", [2, 4, 6], 6)
    promise = operate(
        run, rollback={"to": 4}, set={"lr": 3e-4, "beta2": 0.95, "weight_decay": 0.02},
        reset=["moments"],
    )  # fmt: skip
    latest = torch.load(root / "latest-rank0.pt", weights_only=False)["state"]
    assert latest["timestamp"]["Timestamp"]["batch"] == 4
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    adam, schedule = stepped_cosine(model, 0)
    from torch.distributed.checkpoint.state_dict import set_state_dict

    set_state_dict(
        model, adam, model_state_dict=latest["model"],
        optim_state_dict=latest["optimizers"]["AdamW"],
    )  # fmt: skip
    schedule.load_state_dict(latest["schedulers"]["CosineAnnealingLR"])
    group = adam.param_groups[0]
    assert (group["lr"], group["betas"]) == (promise.lr, promise.betas) == (
        pytest.approx(schedule.get_last_lr()[0]), (0.9, 0.95),
    )  # fmt: skip
    assert group["weight_decay"] == 0.02
    state = next(iter(adam.state.values()))
    assert not state["exp_avg"].any() and int(state["step"]) == 0
    assert look.verify(Run.open(root), level=3).findings == ()
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == before


def test_level_4_reads_what_a_page_describes(tmp_path: Path) -> None:
    root = composer(tmp_path / "run")
    file = root / "ep0-ba6-rank0.pt"
    saved = torch.load(file, weights_only=False)
    saved["best"] = torch.tensor(float("inf"))
    torch.save(saved, file)
    assert look.verify(Run.open(root), level=4).findings == ()
    saved["state"]["model"]["0.weight"][0, 0] = float("nan")
    torch.save(saved, file)
    (finding,) = look.verify(Run.open(root), level=4).findings
    assert "has NaN or Inf: 1 of 8 elements" in finding


def test_counters_that_a_page_names_are_set(tmp_path: Path) -> None:
    root = composer(tmp_path / "run")
    operate(Run.open(root), set={"tokens": 1000})
    counts = torch.load(root / "ep0-ba6-rank0.pt", weights_only=False)["state"]["timestamp"]
    assert counts["Timestamp"] == {"batch": 6, "sample": 48, "token": 1000, "total_wct": WALL_CLOCK}
    refused = call("set", "iteration=3", "-C", root, "--dry-run")
    assert (refused.exit_code, "keeps no iteration" in refused.stderr) == (1, True)


@pytest.mark.parametrize("how", ["option", "settings"])
def test_a_page_of_the_users_own(tmp_path: Path, how: str) -> None:
    root = own(tmp_path / "run")
    given = ["--format", root / "mytrainer.yaml"]
    if how == "settings":
        (root / "ckptsurgeon.yaml").write_text("format: mytrainer.yaml\n")
        given = []
    before = snapshot(root)
    done = call(*given, "rollback", "--to", 10, "--set", "lr=1e-4", "--yes", "-C", root)
    assert done.exit_code == 0, done.stderr
    assert "no loader of it has been asked" in " ".join(done.stdout.split())
    assert (root / "latest.txt").read_text() == "step 10"
    assert not (root / "ckpt" / "20").exists()
    for rank in range(2):
        saved = torch.load(root / f"ckpt/10/optim_{rank}_of_2.pt", weights_only=False)
        assert saved["sched"]["base_lrs"] == [1e-4]
    undone = call(*given, "undo", "--yes", "-C", root)
    assert (undone.exit_code, snapshot(root) == before) == (0, True), undone.stderr
    (root / "ckpt/20/optim_1_of_2.pt").unlink()
    told = call(*given, "status", "-C", root)
    assert "incomplete: 20" in told.stdout


def test_a_step_below_the_first_name_is_a_folder_of_its_own(tmp_path: Path) -> None:
    """`ckpt/` holds all steps here, so it is none."""
    root = own(tmp_path / "run")
    run = Run.open(root, str(root / "mytrainer.yaml"))
    assert run.entries(10) == [root / "ckpt" / "10"]
    assert len(run.format.files(root, 10)) == 2


def test_one_torch_file_by_its_keys(tmp_path: Path) -> None:
    adam, _ = stepped_cosine(torch.nn.Linear(4, 2), 3)
    torch.save({"a": [{"b": adam.state_dict()}]}, tmp_path / "optimizer.pt")
    format = "torch:optimizer.pt=a.0.b"
    shown = call("--format", format, "set-lr", "5e-5", "--dry-run", "-C", tmp_path)
    assert shown.exit_code == 0, shown.stderr
    said = " ".join(shown.stdout.split())
    assert "no loader of it has been asked" in said and "which step it is, is not known" in said
    assert "the next step would use" in said and "step 1" not in said
    told = call("--format", format, "status", "-C", tmp_path)
    assert f"{tmp_path.name} at a step not known" in " ".join(told.stdout.split()), told.stdout
    rows = [" ".join(line.split()) for line in told.stdout.splitlines()]
    assert "steps 1, of a number not known all complete" in rows, told.stdout
    assert not any(row.startswith("latest") for row in rows)  # a pointer would name a number
    for words in (["show"], ["status"], ["verify"], ["set-lr", "5e-5", "--dry-run"]):
        document = json.loads(call("--format", format, *words, "--json", "-C", tmp_path).stdout)
        assert (document["step"], document["promise"]["step"]) == (None, None), words
        assert "which step it is" in document["promise"]["not_known"]["step"]
    assert call("--format", format, "reset", "moments", "--yes", "-C", tmp_path).exit_code == 0
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=False)["a"][0]["b"]
    assert all(not state["exp_avg"].any() for state in saved["state"].values())
    for wrong, words in (
        ("torch:optimizer.pt=a.1.b", "holds nothing that the description names: a.1.b"),
        ("torch:other.pt=a", "matches torch:other.pt=a"),
        ("torch:optimizer.pt", "is not torch:PATH=KEYS"),
        ("nosuch", "no format is called 'nosuch'"),
        ("nosuch.yaml", "nosuch.yaml: No such file"),
    ):
        refused = call("--format", wrong, "set-lr", "5e-5", "--dry-run", "-C", tmp_path)
        assert refused.exit_code in (1, 2)
        assert words in refused.stderr
        assert refused.stderr.count("\n") >= 3


PAGES = {
    "optimisers: []": "unknown key `optimisers`",
    "files: {a.pt: {}}": "no {step} in 'a.pt'",
    "files: {'../{step}.pt': {}}": "no path inside the run",
    "files: {'*/*/*/{step}.pt': {}}": "more than 2 folders of any name",
    "files: {'{step}.pt': {optimizer: [[a]]}}": "unknown key `files.{step}.pt.optimizer`",
    "files: {'{step}.pt': {optimizers: [a]}}": "is not a list",
    "files: {'{step}.pt': {optimizers: [[true]]}}": "is not a list of keys and numbers",
    "files: {'{step}.pt': {fields: {lr: [[a]]}}}": "unknown key `files.{step}.pt.fields.lr`",
    "files: {'{step}.pt': {optional: 2}}": "is neither true nor false",
    "files: {'{step}/a': {loader: dcp, optional: true}}": "and so no has, groups or optional",
    "files: {'{step}/a': {loader: dcp}, '{step}/b': {loader: dcp, optimizers: [[b]]}}": (
        "after one of dcp it takes `weights` alone"
    ),
    "pointer: {file: latest}": "has `file` and `text`",
    "pointer: {file: latest, text: newest}": "has no {step}",
    "pointer: {file: latest, text: '{step}-*'}": "has `*`, and a surgery must write all of it",
    "pointer: {file: latest, text: '{file} of {step}'}": "has more than {file}",
    "pointer: {file: latest, text: '{step} in {epoch}'}": "has {epoch}, and the first of",
    "unfinished: 3": "is no ending of a name",
    "unfinished: /": "is no ending of a name",
    "unfinished: /..": "is no ending of a name",
    "unfinished: /a/b": "is no ending of a name",
    "unfinished: a/b": "is no ending of a name",
    "unfinished: /mark": "is inside of a step, and '{step}.pt' is a file",
    "options: {lr: --lr}": "unknown key `options.lr`",
    "name: ''": "`name` is missing",
}


@pytest.mark.parametrize("line", PAGES)
def test_a_wrong_page_is_refused_with_its_key(tmp_path: Path, line: str) -> None:
    page: dict[str, str] = {"name": "name: x", "files": "files: {'{step}.pt': {}}"}
    page[line.partition(":")[0]] = line
    (tmp_path / "page.yaml").write_text("\n".join(page.values()))
    with pytest.raises(UsageError) as refused:
        Description.read(tmp_path / "page.yaml")
    assert PAGES[line] in refused.value.what
    assert str(tmp_path / "page.yaml") in refused.value.what


def test_a_run_that_two_pages_describe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = composer(tmp_path / "run")
    shipped = Path(detect.__file__).parent / "described"
    twin = shipped / "composer.yaml"
    from ckptsurgeon.formats.described import pages

    real = pages.shipped

    def double(name: str) -> Any:
        if name != "twin":
            return real(name)
        return pages.Described(Description.of({**_data(twin), "name": "twin"}, "twin"))

    monkeypatch.setattr(pages, "shipped", double)
    monkeypatch.setattr(detect, "DESCRIBED", ("composer", "twin"))
    told = call("status", "-C", root, "--json")
    assert told.exit_code == 2
    document = json.loads(told.stderr)
    assert "looks like a run of composer and twin" in document["error"]
    assert call("status", "-C", root, "--format", "composer").exit_code == 0


def test_a_run_that_two_formats_recognize(tmp_path: Path) -> None:
    """As where two trainers saved into one folder: `--format` decides, by the name of either."""
    root = make_run(tmp_path / "run")
    (root / "latest").write_text("global_step4")
    before = snapshot(root)
    told = call("set-lr", "1e-4", "--yes", "-C", root)
    assert told.exit_code == 2
    assert f"{root} looks like a run of deepspeed and transformers" in told.stderr
    assert "the run is exactly as it was" in told.stderr
    for name in ("deepspeed", "transformers"):
        assert f"status --format {name}" in told.stderr
    assert snapshot(root) == before
    chosen = call("set-lr", "1e-4", "--yes", "-C", root, "--format", "transformers")
    assert chosen.exit_code == 0, chosen.stderr
    unknown = call("status", "-C", root, "--format", "transformer")
    assert "no format is called 'transformer'" in unknown.stderr
    assert "transformers" in unknown.stderr.partition("next:")[2]


def test_a_file_that_is_no_step_hides_no_other(tmp_path: Path) -> None:
    """The newest by its name is cut short, or another program's."""
    root = tmp_path / "run"
    saved = {"pytorch-lightning_version": "2.6.6", "state_dict": {}, "lr_schedulers": []}
    model = torch.nn.Linear(4, 2)
    for step in (2, 4):
        adam, _ = stepped_cosine(model, step)
        root.mkdir(exist_ok=True)
        more = {"global_step": step, "optimizer_states": [adam.state_dict()]}
        torch.save({**saved, **more}, root / f"a{step}.ckpt")
    torch.save(model.state_dict(), root / "weights.ckpt")
    (root / "z.ckpt").write_bytes((root / "a4.ckpt").read_bytes()[:500])
    assert Run.open(root).steps() == [2, 4]
    alone = tmp_path / "alone"
    alone.mkdir()
    for name, why in (("weights.ckpt", "holds no "), ("z.ckpt", ": byte ")):
        shutil.copy(root / name, alone / name)
        for words in ((), ("--format", "lightning")):
            told = call("set-lr", "1e-4", "--yes", "-C", alone, *words)
            assert told.exit_code == 2
            first, untouched, then = told.stderr.splitlines()
            assert f"{alone / name}{'' if ':' in why else ' '}{why}" in first
            assert "so its step is not known" in first
            assert "exactly as it was" in untouched and "a page with the key path" in then
        (alone / name).unlink()


def _data(page: Path) -> dict[str, Any]:
    from ckptsurgeon.files import plain_yaml

    return plain_yaml.read(page)


def test_the_folder_above_the_checkpoints_names_theirs(tmp_path: Path) -> None:
    composer(tmp_path / "run" / "checkpoints")
    told = call("status", "-C", tmp_path / "run")
    assert told.exit_code == 2
    assert f"ckptsurgeon -C {tmp_path / 'run' / 'checkpoints'} status" in told.stderr


def test_check_format_tries_everything_on_a_copy(tmp_path: Path) -> None:
    root = own(tmp_path / "run")
    before = snapshot(root)
    told = call("check-format", root / "mytrainer.yaml", "-C", root, "--json")
    assert told.exit_code == 0, told.stderr
    document = json.loads(told.stdout)
    assert document["sound"] and document["steps"] == [10, 20]
    outcomes = {trial["operation"]: trial for trial in document["trials"]}
    assert outcomes["set lr=0.5x"]["places"] > 0 and not outcomes["set lr=0.5x"]["refused"]
    assert outcomes["set consumed_samples"]["places"] == 2
    assert "keeps no tokens" in outcomes["set tokens"]["refused"]
    assert snapshot(root) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    text = call("check-format", root / "mytrainer.yaml", "-C", root)
    assert "every operation was undone, byte for byte" in text.stdout


def test_check_format_names_a_path_that_leads_nowhere(tmp_path: Path) -> None:
    root = own(tmp_path / "run")
    page = OWN.replace("schedulers: [[sched]]", "schedulers: [[schedule]]")
    (root / "mytrainer.yaml").write_text(page)
    told = json.loads(call("check-format", root / "mytrainer.yaml", "-C", root, "--json").stdout)
    assert told["idle"] == ["ckpt/{step}/optim_{rank}_of_{world}.pt: schedule"]


@pytest.mark.parametrize("recipe", [{"set": {"lr": 1e-5}}, {"cooldown": {"steps": 2}}])
def test_a_scheduler_that_is_not_where_the_page_says_refuses_a_rate(
    tmp_path: Path, recipe: dict[str, Any]
) -> None:
    """The groups' lr alone would last for one update: the scheduler is under another key."""
    root = own(tmp_path / "run")
    page = OWN.replace("schedulers: [[sched]]", "schedulers: [[schedule]]")
    (root / "mytrainer.yaml").write_text(page)
    run = Run.open(root, str(root / "mytrainer.yaml"))
    with pytest.raises(SurgeryError, match=r"optim_0_of_2\.pt: schedule leads nowhere"):
        surgery.plan(run, from_data(recipe))
    surgery.plan(run, from_data({"set": {"beta2": 0.95}}))


def test_a_pointer_that_the_page_can_not_read_is_shown(tmp_path: Path) -> None:
    root = own(tmp_path / "run")
    (root / "mytrainer.yaml").write_text(OWN.replace("step {step}", "stop {step}"))
    with pytest.raises(SurgeryError, match=r"latest\.txt .*names no step: it says 'step 20'"):
        Run.open(root, str(root / "mytrainer.yaml")).latest()


def test_check_format_says_what_an_undo_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = own(tmp_path / "run")
    real = surgery.apply

    def careless(run: Run, plan: Any) -> Any:
        done = real(run, plan)
        if plan.undoes is not None:
            shutil.copy(run.root / "latest.txt", run.root / "left behind")
        return done

    monkeypatch.setattr(surgery, "apply", careless)
    told = call("check-format", root / "mytrainer.yaml", "-C", root)
    assert told.exit_code == 4
    assert "left behind differs after the undo" in told.stderr
