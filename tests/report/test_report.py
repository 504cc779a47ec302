"""What a plan, a receipt and an error look like, on values made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ckptsurgeon import report
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import (
    ABSENT,
    ZEROS,
    AnyChange,
    Append,
    Aside,
    Change,
    Content,
    Edit,
    Move,
    NewText,
    Replace,
    Rewrite,
    Span,
    Truncate,
)
from ckptsurgeon.plans.plan import Plan, Receipt
from ckptsurgeon.report.style import value
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.export import Export
from ckptsurgeon.surgery.fork import Fork
from ckptsurgeon.transaction.recovery import Recovery
from tests.support.promise import PROMISE

LOOK = report.Style(width=100)


def _lr(shard: int) -> list[AnyChange]:
    model, optim = f"global_step6210/model{shard}.pt", f"global_step6210/optim{shard}.pt"
    return [
        Change(model, "lr", 6e-5, 3e-5, ("lr_scheduler", "max_lr")),
        Change(optim, "lr", 5.37e-5, 2.685e-5, ("base", "param_groups", 0, "lr")),
        Change(optim, "lr", 5.37e-5, 2.685e-5, ("base", "param_groups", 1, "lr")),
    ]


CHANGES: tuple[AnyChange, ...] = (
    *(Aside(f"global_step{step}", "checkpoint") for step in (6600, 6900, 7200)),
    NewText("latest", "latest", "global_step7200", "global_step6210"),
    NewText("latest_checkpointed_iteration.txt", "latest", "7200", "6210"),
    *_lr(0),
    *_lr(1),
    Change("global_step6210/model0.pt", "skip", [], [[6900, 7010]], ("skip_ranges",)),
    Rewrite("tb/events.1", "tensorboard", Content((Span("tb/events.1", 0, 900),)), "cut at 6210"),
    Rewrite("tb/glitch/events.1", "tensorboard", Content((b"x" * 100,)), "9 events", new_file=True),
    *(Aside(f"tb/events.{i}", "tensorboard") for i in (2, 3, 4)),
)
EDITS: tuple[Edit, ...] = (
    Append.of("global_step6210/model0.pt", 10_000, ((10_000, b"x" * 900), (12_000, b"y" * 100)), 0),
    Replace("tb/events.1", "s", "k", Content((Span("tb/events.1", 0, 900),))),
    Move("global_step7200", "a"),
)
PLAN = Plan(
    id="0001",
    run="/runs/tr8-104B",
    title="rollback 7200 → 6210",
    recipe={"rollback": {"to": 6210}, "why": "lm loss 6.4 → 14"},
    changes=CHANGES,
    edits=EDITS,
    assumes=(),
    promise=PROMISE,
    before=replace(PROMISE, lr=5.37e-5, skip=()),
    warnings=("latest_universal is not changed: it names a converted checkpoint",),
)
RECEIPT = Receipt(
    id="0001",
    title=PLAN.title,
    why="lm loss 6.4 → 14",
    when="2021-09-20T10:00:00+00:00",
    user="meg",
    host="login1",
    version="0.1.0",
    recipe=PLAN.recipe,
    changes=CHANGES,
    inverse=(),
    promise=PROMISE,
)


def test_a_plan_shows_grouped_changes_the_next_step_and_the_cost() -> None:
    assert report.plan(PLAN, "tr8-104B", LOOK) == (
        """\
tr8-104B   rollback 7200 → 6210

  checkpoints  > 6600 6900 7200          to the attic
  latest       ~ global_step7200 → global_step6210
               ~ 7200 → 6210             latest_checkpointed_iteration.txt
  lr           ~ 6.000e-05 → 3.000e-05   2 places in 2 shards (max_lr)
               ~ 5.370e-05 → 2.685e-05   4 places in 2 shards (lr)
  skip         + 6900-7010               1 place in 1 shard
  events       ~ 1 file: cut at 6210
               + 1 file in tb/glitch/: 9 events
               > 3 files to the attic

  step 6211 will use   lr 2.685e-05   beta 0.9, 0.999   adam step 6210   eps 1e-08
                       weight decay 0.1, 0   loss scale 2048   clip 1   seed 43
                       next sample 12718080   skip 6900-7010
  cost                 3.0 kB written, no shard copied, undo kept
  note  latest_universal is not changed: it names a converted checkpoint"""
    )


def test_an_undo_shows_the_changes_the_other_way_round() -> None:
    undo = Plan("0002", "/runs/x", "undo 0001", {}, (), EDITS[2:], (), None, undoes="0001")
    assert report.plan(undo, "x", LOOK, RECEIPT) == (
        """\
receipt 0001   rollback 7200 → 6210   by meg, 2021-09-20T10:00:00+00:00

  checkpoints  < 6600 6900 7200          from the attic
  latest       ~ global_step6210 → global_step7200
               ~ 6210 → 7200             latest_checkpointed_iteration.txt
  lr           ~ 3.000e-05 → 6.000e-05   2 places in 2 shards (max_lr)
               ~ 2.685e-05 → 5.370e-05   4 places in 2 shards (lr)
  skip         ~ 6900-7010 → none        1 place in 1 shard
  events       ~ 1 file as before
               > 1 file to the attic
               < 3 files from the attic

  cost   0 B written, no shard copied"""
    )
    files = "\n  files  renames global_step7200 → a\n"
    assert files in report.plan(undo, "x", LOOK, RECEIPT, files=True)
    assert report.plan(undo, "x", LOOK, RECEIPT, brief=True) == (
        """\
receipt 0001   rollback 7200 → 6210   by meg, 2021-09-20T10:00:00+00:00

  cost   0 B written, no shard copied"""
    )


def test_what_an_undo_does_is_read_off_its_edits_whatever_the_receipt_says() -> None:
    attic, staged = ".ckptsurgeon/attic/0001", ".ckptsurgeon/attic/0002"
    edits: tuple[Edit, ...] = (
        *(Truncate(f"step8/shard{number}", 4, 9, "", ((4, 9),), 0) for number in range(40)),
        Replace("latest", f"{attic}/latest", f"{staged}/latest"),
        Replace("train.yaml", ".ckptsurgeon/staging/0002/train.yaml", f"{staged}/train.yaml"),
        Move(f"{attic}/step12", "step12"),
        Move("../tb/events.tfevents", f"../tb/{staged}/events.tf-events"),
    )
    undo = Plan("0002", "/runs/x", "undo 0001", {}, (), edits, (), None, undoes="0001")
    shown = report.plan(undo, "x", LOOK, replace(RECEIPT, changes=()))
    assert (
        """
  files  cuts back shard0 shard1 shard2 … shard39  (40)   in step8
         brings back latest step12
         rewrites train.yaml
         takes away events.tfevents   in ../tb
"""
        in shown
    ), shown


def test_a_short_event_line_stays_one_line() -> None:
    plan = replace(PLAN, changes=(CHANGES[-5], *CHANGES[-3:]))
    assert "events  ~ 1 file: cut at 6210, > 3 files to the attic" in report.plan(plan, "x", LOOK)


def test_nothing_to_do_says_so_and_keeps_the_warnings() -> None:
    plan = replace(PLAN, changes=(), edits=())
    assert report.plan(plan, "tr8-104B", LOOK) == (
        "nothing to do: tr8-104B is already at step 6210\n"
        "  note  latest_universal is not changed: it names a converted checkpoint"
    )
    more = replace(plan, title="set lr=3e-05", recipe={"set": {"lr": 3e-5}}, warnings=())
    assert report.plan(more, "tr8-104B", LOOK) == (
        "nothing to do: set lr=3e-05 would change nothing in tr8-104B"
    )


def test_a_surgery_that_holds_the_weights_does_not_promise_a_rate_of_0() -> None:
    held = replace(RECEIPT, promise=replace(PROMISE, lr=0.0, rewarm=("hold", 10, 20)))
    assert (
        "verified: step 6211 holds the weights until the schedule is at sample 20, from 10"
        in report.done(held, LOOK)
    )
    followed = replace(held, promise=replace(held.promise, then=(6216, 4.9e-4)))
    assert "verified: step 6211 holds the weights; lr 4.900e-04 from step 6216" in report.done(
        followed, LOOK
    )
    ended = replace(RECEIPT, promise=replace(PROMISE, lr=1e-3, rewarm=("hold", 10, 20)))
    assert "verified: step 6211 uses lr 1.000e-03" in report.done(ended, LOOK)


def test_a_fork_names_the_commands_that_come_next() -> None:
    for launchable, start in (
        (True, "ckptsurgeon -C b relaunch"),
        (False, "its trainer, which is to resume and save in b"),
    ):
        done = Fork(Path("b"), 6, 3, 856)
        text = report.fork(done, "copy", LOOK, written=True, launchable=launchable)
        assert text.splitlines() == [
            "made b: step 6, 3 files, 856 B by copy",
            "  status   ckptsurgeon -C b status",
            f"  start    {start}",
        ]


def test_an_export_counts_its_shards_and_names_the_index() -> None:
    files = ("model.safetensors", "index.json")
    text = report.export(Path("w"), Export(Path("w"), files, 28, 1200))
    assert text == "wrote 28 tensors, 1.2 kB in 1 file and an index to w"
    text = report.export(Path("w"), Export(Path("w"), (), 28, 1200, ("ema.pt is left out",)))
    assert text == "would write 28 tensors, 1.2 kB to w\n  note     ema.pt is left out"


def test_pointers_that_disagree_are_listed_with_their_steps(tmp_path: Path) -> None:
    (tmp_path / "global_step6").mkdir()
    (tmp_path / "latest").write_text("global_step99")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    text = report.status(Run.open(tmp_path), None, None, LOOK)
    assert "latest → 99 (not saved)" in text
    assert "latest_checkpointed_iteration.txt → 6" in text


def test_colour_is_yellow_for_what_moves_aside_and_nothing_else_in_a_plan() -> None:
    text = report.plan(PLAN, "x", report.Style(100, color=True))
    painted = [line for line in text.splitlines() if "\033" in line]
    assert [line.count("\033[33m") for line in painted] == [1, 1]
    assert all(">" in line for line in painted)
    assert "\033[32mdone:" in report.done(RECEIPT, report.Style(100, color=True))
    assert "\033[31merror:" in report.error(
        SurgeryError("x", next="y"), report.Style(100, color=True)
    )


def test_a_step_is_named_once_and_by_its_number() -> None:
    folders = [f"{above}/{step:06}" for step in (8, 10) for above in ("checkpoints", "weights")]
    changes = (*(Aside(folder, "checkpoint") for folder in folders), *CHANGES[3:4])
    shown = report.plan(replace(PLAN, changes=changes), "x", LOOK)
    assert "checkpoints  > 8 10 " in shown


def test_many_checkpoints_take_one_line() -> None:
    steps = [Aside(f"global_step{step}", "checkpoint") for step in range(100, 2100, 100)]
    text = report.plan(replace(PLAN, changes=tuple(steps)), "x", LOOK)
    assert "> 100 200 300 … 2000  (20)   to the attic" in text


def test_equal_changes_of_many_files_take_one_line() -> None:
    step = [Change(f"g_universal/zero/{i}.weight/step.pt", "adam step", 6, 0) for i in range(1000)]
    text = report.plan(replace(PLAN, changes=tuple(step)), "x", LOOK)
    assert "  adam step  ~ 6 → 0   1000 files called step.pt\n" in text


def test_equal_changes_of_many_keys_and_parameters_take_one_line() -> None:
    keys = [(f"optimizer.param_groups.layers.{i}.weight.lr",) for i in range(1000)]
    rates = tuple(Change(".metadata", "lr", 1e-3, 5e-4, key) for key in keys)
    text = report.plan(replace(PLAN, changes=rates), "x", LOOK)
    assert "  lr  ~ 1.000e-03 → 5.000e-04   1000 places in 1 shard\n" in text
    zeros = tuple(
        Change(f"rank{i % 4}.pt", f"exp_avg of layers.{i}.weight", "values", ZEROS, ("exp_avg",))
        for i in range(1000)
    )
    text = report.plan(replace(PLAN, changes=zeros), "x", LOOK)
    assert "  exp_avg  ~ values → zeros   1000 places in 4 shards\n" in text
    assert len(text.splitlines()) < 12
    few = report.plan(replace(PLAN, changes=zeros[:2]), "x", LOOK)
    assert "exp_avg of layers.1.weight  ~ values → zeros" in few


def test_new_files_of_one_folder_are_counted_together() -> None:
    cut = [
        Rewrite(f"tb/cut/e{i}", "tensorboard", Content((b"",)), f"the cut branch, {i} events", True)
        for i in (5, 6, 7)
    ]
    text = report.plan(replace(PLAN, changes=tuple(cut)), "x", LOOK)
    assert "  events  + 3 files in tb/cut/: the cut branch, 18 events\n" in text


def test_a_number_for_each_of_many_groups_is_not_listed() -> None:
    assert value("weight_decay", [0.1] * 900) == "0.1  (all 900)"
    assert value("weight_decay", [0.1, 0.0] * 450) == "0.1, 0, 0.1 … 0  (900)"


def test_an_absent_value_is_added() -> None:
    change = Change("a.pt", "seed", ABSENT, 43, ("args", "seed"))
    assert "seed  + 43   1 place in 1 shard" in report.plan(
        replace(PLAN, changes=(change,)), "x", LOOK
    )


def test_a_copied_shard_is_part_of_the_cost() -> None:
    empty = Replace("global_step2/a.pt", "s", "k", Content(()))
    copy = replace(empty, content=Content((Span("global_step2/a.pt", 0, 5000),)))
    assert "5.0 kB written, 1 shard copied, undo kept" in report.plan(
        replace(PLAN, edits=(empty, copy)), "x", LOOK
    )


def test_an_error_has_three_parts() -> None:
    error = SurgeryError(
        "global_step6210 is incomplete: 3 of 256 shards are missing\nfirst: zero_pp_rank_4.pt",
        next=("ckptsurgeon status", "ckptsurgeon rollback --to 6000"),
    )
    assert report.error(error, LOOK) == (
        """\
error: global_step6210 is incomplete: 3 of 256 shards are missing
       first: zero_pp_rank_4.pt
untouched: the run is exactly as it was
next: ckptsurgeon status
      ckptsurgeon rollback --to 6000"""
    )


def test_done_names_the_next_commands() -> None:
    assert report.done(RECEIPT, LOOK) == (
        """\
done: receipt 0001; verified: step 6211 uses lr 2.685e-05, skip 6900-7010
  undo     ckptsurgeon undo 0001
  resume   ckptsurgeon relaunch"""
    )
    undo = replace(RECEIPT, id="0002", promise=None, undoes="0001", steps=(6210,), restored="same")
    assert report.done(undo, LOOK, back=command("redo")) == (
        "done: receipt 0002; checkpoints and logs are byte for byte what they were before 0001\n"
        "  redo     ckptsurgeon redo\n"
        "  resume   ckptsurgeon relaunch"
    )


def test_the_log_is_newest_first_with_reasons() -> None:
    undo = replace(RECEIPT, id="0002", title="undo 0001", why="", undoes="0001")
    assert report.log([RECEIPT, undo], LOOK) == (
        """\
0002   undo 0001
       2021-09-20T10:00:00+00:00   meg@login1
0001   rollback 7200 → 6210   (undone by 0002)
       2021-09-20T10:00:00+00:00   meg@login1
       why: lm loss 6.4 → 14"""
    )
    assert report.log([], LOOK) == "no surgery yet"


def test_a_recovery_says_on_which_side_the_run_is() -> None:
    assert "no surgery was interrupted" in report.recovery(Recovery("nothing"), LOOK)
    assert "exactly as it was" in report.recovery(Recovery("discarded", "set lr"), LOOK)
    finished = Recovery("finished", "set lr", RECEIPT.id)
    assert f"undo {RECEIPT.id}" in report.recovery(finished, LOOK, RECEIPT)


def test_a_plan_document_is_json_with_numbers_that_json_has() -> None:
    odd = replace(PLAN, promise=replace(PROMISE, loss_scale=float("inf")))
    document = report.plan_json(odd, "deepspeed", RECEIPT)
    told = json.loads(json.dumps(document, allow_nan=False))
    assert told["promise"]["loss_scale"] == "inf"
    assert told["promise"]["skip"] == [[6900, 7010]]
    assert (told["step"], told["applied"], told["receipt"]) == (6210, True, "0001")
    kinds = [change["kind"] for change in told["changes"]]
    assert set(kinds) == {"change", "aside", "rewrite"}


def test_rates_that_look_alike_are_told_apart() -> None:
    change = Change("a.pt", "lr", 6.0001e-5, 6.0002e-5, ("lr",))
    text = report.plan(replace(PLAN, changes=(change,)), "x", LOOK)
    assert "~ 6.0001e-05 → 6.0002e-05   1 place in 1 shard" in text
