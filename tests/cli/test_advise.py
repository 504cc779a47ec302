"""`advise` and `report` as a user types them: on runs, bare logs, other files, and bad input."""

from __future__ import annotations

import csv
import gzip
import html
import io
import json
import random
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon.logs.tensorboard import event_file, frame
from tests.cli.conftest import Surgeon
from tests.conftest import Trained
from tests.look.advised_runs import kept
from tests.support.event_logs import spiked, write_log
from train.log import Report, loss_line
from train.progress import Progress


def answer(surgeon: Surgeon, *words: object) -> dict[str, Any]:
    done = surgeon("advise", "--json", *words)
    assert done.exit_code in (0, 3), done.stderr
    told = dict(json.loads(done.stdout))
    assert (done.exit_code == 3) == (told["verdict"] == "diverged")
    return told


# --- what it reads -------------------------------------------------------------------------------


def rows(name: str = "lr-too-high", seed: int = 1) -> list[dict[str, str]]:
    text = gzip.decompress(kept(name, seed).read_bytes()).decode()
    return list(csv.DictReader(io.StringIO(text)))


def test_every_kind_of_log_leads_to_the_same_spikes(surgeon: Surgeon, tmp_path: Path) -> None:
    table = rows()
    losses = [float(row["loss"]) for row in table]
    files = {
        name: tmp_path / name for name in ("log.csv", "log.jsonl", "trainer_state.json", "out")
    }
    files["log.csv"].write_bytes(gzip.decompress(kept("lr-too-high", 1).read_bytes()))
    objects = [{"step": int(row["step"]), "loss": float(row["loss"])} for row in table]
    files["log.jsonl"].write_text("".join(json.dumps(item) + "\n" for item in objects))
    files["trainer_state.json"].write_text(json.dumps({"log_history": objects}))
    files["out"].write_text(
        "".join(
            f"noise\n{loss_line(report(float(r['loss'])), progress(int(r['step'])), 600)}\n"
            for r in table
        )
    )
    write_log(tmp_path / "tb", losses)
    told = [answer(surgeon, "--log", file) for file in files.values()]
    told.append(answer(surgeon, "--tb", tmp_path / "tb"))
    assert [item["verdict"] for item in told] == ["diverged"] * 5
    assert [item["onset"] for item in told] == [302] * 5
    assert {item["points"] for item in told} == {600}
    assert told[0]["spikes"][-1]["signs"][1]["signal"] == "grad-norm"


def report(loss: float) -> Report:
    return Report(loss, 1e-3, 8, 1.0, 1.0, 0, 0.1)


def progress(step: int) -> Progress:
    return Progress(iteration=step, samples=step * 8, tokens=0, gigaflos=0.0)


@pytest.mark.parametrize(
    "line",
    [
        "[titan] 2026-08-21 - root - INFO - step: {step:2}  loss: {loss:8.5f}  grad_norm:  1.0",
        "h:0\tolmo_core.train:92\tINFO\t[step={step}/600,epoch=1]\n    optim/LR (group 0)=0.0004\n"
        "    optim/total grad norm=1.0\n    train/CE loss={loss:.4f}",
        "x: iteration: {step} / 600 | consumed_tokens: 1K | lm_loss: {loss:.3g} | lr: 1e-4 | "
        "grad_norm: 1.0",
        '2022 | INFO | train_inner | {{"num_updates": "{step}", "loss": "{loss:g}", "gnorm": "1"}}',
    ],
    ids=["torchtitan", "OLMo-core", "nanotron", "metaseq"],
)
def test_the_printed_lines_of_other_trainers(surgeon: Surgeon, tmp_path: Path, line: str) -> None:
    (tmp_path / "out").write_text(
        "".join(
            line.format(step=int(row["step"]), loss=float(row["loss"])) + "\n" for row in rows()
        )
    )
    told = answer(surgeon, "--log", tmp_path / "out")
    assert (told["verdict"], told["onset"], told["points"]) == ("diverged", 302, 600)


def test_a_tag_by_another_name(surgeon: Surgeon, tmp_path: Path) -> None:
    write_log(tmp_path / "tb", spiked(), tag="my/objective")
    assert answer(surgeon, "--tb", tmp_path / "tb")["verdict"] == "unknown"
    assert answer(surgeon, "--tb", tmp_path / "tb", "--tag", "loss=my/objective")["onset"] == 250


# --- a run ---------------------------------------------------------------------------------------


def test_what_was_saved_after_the_end_of_the_log_is_not_called_healthy(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    (file,) = (root / "tensorboard").glob("*tfevents*")
    file.unlink()
    write_log(root / "tensorboard", [2 - k / 100 for k in range(80)])
    note = "the logs end at step 80, before the checkpoint of step 8000: what follows is not judged"
    assert answer(surgeon, "-C", root)["notes"] == []
    for step in root.glob("global_step8"):
        step.rename(root / "global_step8000")
    (root / "latest").write_text("global_step8000")
    (root / "latest_checkpointed_iteration.txt").write_text("8000")
    assert answer(surgeon, "-C", root)["notes"] == [note]


def test_a_recipe_comes_out_that_plan_accepts(surgeon: Surgeon, diverged: Path) -> None:
    told = answer(surgeon, "-C", diverged)
    assert (told["verdict"], told["onset"], told["back_to"]) == ("diverged", 201, 8)
    assert [item["step"] for item in told["candidates"]] == [8, 6, 4, 2]
    assert all(item["sound"] for item in told["candidates"])
    assert told["candidates"][0]["distance"]["steps"] == 392
    recipe = diverged / "recipe.yaml"
    before = sorted(path for path in diverged.rglob("*"))
    done = surgeon("advise", "-C", diverged, "-o", recipe)
    assert done.exit_code == 3, done.stderr
    assert sorted({*before, recipe}) == sorted(diverged.rglob("*"))
    first = next(item for item in told["recipes"] if item["recipe"] is not None)
    text = recipe.read_text()
    assert f"# Source: {first['source']}." in text and "rollback:\n  to: 8\n" in text
    assert f"ckptsurgeon -C {diverged} apply {recipe}" in done.stdout.splitlines()[-1]
    assert surgeon("plan", recipe, "-C", diverged).exit_code == 0
    again = surgeon("advise", "-C", diverged, "-o", recipe)
    assert again.exit_code == 2 and recipe.read_text() == text


@pytest.mark.parametrize("others", [True, False], ids=["older-steps", "alone"])
def test_a_step_that_is_too_close_to_the_onset_is_called_so_everywhere(
    surgeon: Surgeon, diverged: Path, others: bool
) -> None:
    """Only that is said of it: also where nothing else is saved, and not of an unsound step that
    is far enough."""
    assert surgeon("set", "iteration=198", "--yes", "-C", diverged).exit_code == 0
    (diverged / "global_step8").rename(diverged / "global_step198")
    (diverged / "latest").write_text("global_step198")
    (diverged / "latest_checkpointed_iteration.txt").write_text("198")
    for step in () if others else (2, 4, 6):
        shutil.rmtree(diverged / f"global_step{step}")
    for path in diverged.glob("global_step6/*model_states.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    told = answer(surgeon, "-C", diverged)
    assert (told["onset"], told["back_to"]) == (201, 4 if others else None)
    said = {item["step"]: (item["sound"], item["too_near"]) for item in told["candidates"]}
    older = {6: (False, False), 4: (True, False), 2: (True, False)}
    assert said == {198: (True, True), **(older if others else {})}
    lines = surgeon("advise", "-C", diverged).stdout.splitlines()
    assert [line.split()[0] for line in lines if "too close to onset" in line][-1:] == ["198"]
    page = diverged / "run.html"
    assert surgeon("report", "-C", diverged, "-o", page).exit_code == 0
    rows = re.findall(r"<tr><td>(\d+)</td><td>\w+</td><td>\d+</td><td>(.*?)</td>", page.read_text())
    assert [step for step, said in rows if said == "too close to onset"] == ["198"]


def test_another_recipe_can_be_taken(surgeon: Surgeon, diverged: Path) -> None:
    recipes = answer(surgeon, "-C", diverged)["recipes"]
    number, chosen = next(
        (i, item) for i, item in enumerate(recipes, 1) if i > 1 and item["recipe"] is not None
    )
    text = surgeon("advise", "-C", diverged, "--recipe", number).stdout
    assert f"advise -o recipe.yaml --recipe {number}" in text.splitlines()[-1]
    file = diverged / "other.yaml"
    assert surgeon("advise", "-C", diverged, "--recipe", number, "-o", file).exit_code == 3
    assert f"# Source: {chosen['source']}." in file.read_text()
    assert surgeon("plan", file, "-C", diverged).exit_code == 0
    done = surgeon("advise", "-C", diverged, "--recipe", 99)
    assert done.exit_code == 2 and f"{len(recipes)} recipes are proposed" in done.stderr


def test_nan_is_named_and_dated(surgeon: Surgeon, tmp_path: Path) -> None:
    """A jump at 1501, NaN from 1901; the level is that of right before the jump."""
    dice = random.Random(3)
    rows = [f"{k},{6 / k**0.15 + dice.gauss(0, 0.03) + (2 if k > 1500 else 0):.4f}"
            if k <= 1900 else f"{k},nan" for k in range(1, 2001)]  # fmt: skip
    (tmp_path / "log.csv").write_text("step,loss\n" + "\n".join(rows) + "\n")
    done = surgeon("advise", "--log", tmp_path / "log.csv")
    assert done.exit_code == 3 and "diverged at 1,501: loss 2.01 → NaN" in done.stdout
    assert (
        "loss at 1901" in done.stdout and "not a finite number" in done.stdout and not done.stderr
    )
    (tmp_path / "log.csv").write_text("step,loss\n" + "\n".join(rows[:1500] + rows[1900:]) + "\n")
    done = surgeon("advise", "--log", tmp_path / "log.csv")
    assert "diverged at 1,901: loss 2.0" in done.stdout and "before, NaN now" in done.stdout
    assert done.stdout.count("not a finite number") == 1


def test_healthy_says_what_was_judged(surgeon: Surgeon, tmp_path: Path) -> None:
    write_log(tmp_path / "tb", spiked(150, at=1000))
    text = surgeon("advise", "--tb", tmp_path / "tb").stdout
    assert "healthy: no divergence in steps 23 to 150" in text


def test_the_answer_names_rules_steps_and_sources(surgeon: Surgeon, diverged: Path) -> None:
    text = surgeon("advise", "-C", diverged).stdout
    for part in (
        "diverged at 201: loss 2 → 9", "6 sigma over 128 points (OLMo-core)",
        "193 steps earlier; 392 steps", "PaLM (arXiv 2204.02311)", "not recovered after 199 steps",
    ):  # fmt: skip
        assert part in text
    (chosen,) = (line for line in text.splitlines() if "go back here" in line)
    assert chosen.split()[0] == "8"
    assert text.splitlines()[-1].startswith(
        f"  next   ckptsurgeon -C {diverged} advise -o recipe.yaml    "
    )
    assert max(len(line) for line in text.splitlines() if "  next" not in line) <= 100


def test_doctor_says_that_the_loss_diverged(surgeon: Surgeon, diverged: Path) -> None:
    done = surgeon("doctor", "-C", diverged)
    assert done.exit_code == 4
    assert "the loss diverged at step 201" in done.stdout
    assert f"next: ckptsurgeon -C {diverged} advise" in done.stdout


def test_nothing_is_proposed_to_a_healthy_run(surgeon: Surgeon, tmp_path: Path) -> None:
    write_log(tmp_path / "tb", spiked(at=1000))
    told = answer(surgeon, "--tb", tmp_path / "tb")
    assert told["verdict"] == "healthy" and told["spikes"] == [] == told["recipes"]
    done = surgeon("advise", "--tb", tmp_path / "tb", "-o", tmp_path / "recipe.yaml")
    assert done.exit_code == 1 and "nothing is proposed" in done.stderr
    assert not (tmp_path / "recipe.yaml").exists()


def test_one_rule_can_be_picked(surgeon: Surgeon, tmp_path: Path) -> None:
    write_log(tmp_path / "tb", spiked())
    told = answer(surgeon, "--tb", tmp_path / "tb", "--rule", "olmo2")
    assert told["verdict"] == "unknown" and "1001" in told["reason"]
    told = answer(surgeon, "--tb", tmp_path / "tb", "--rule", "cusum")
    assert {spike["rule"] for spike in told["spikes"]} == {"cusum"}


def test_the_page_has_the_recipe_and_the_command_of_advise(
    surgeon: Surgeon, diverged: Path
) -> None:
    recipe, page = diverged / "recipe.yaml", diverged / "run.html"
    assert surgeon("report", "-C", diverged, "-o", page).exit_code == 0
    shown = html.unescape(page.read_text())
    told = surgeon("advise", "-C", diverged).stdout.splitlines()
    assert told[0].partition("   ")[2] in shown and "loss 2 → 9" in shown
    assert f"<pre>{told[-1].split('   ')[1].strip()}</pre>" in shown
    assert surgeon("advise", "-C", diverged, "-o", recipe).exit_code == 3
    assert f"<pre>{recipe.read_text()}</pre>" in shown


def test_a_picture_is_written_once(surgeon: Surgeon, diverged: Path) -> None:
    file = diverged / "run.svg"
    done = surgeon("report", "-C", diverged, "-o", file)
    assert done.exit_code == 0, done.stderr
    assert file.read_bytes().startswith(b"<?xml")
    file.write_text("a picture of before")
    again = surgeon("report", "-C", diverged, "-o", file)
    assert (again.exit_code, file.read_text()) == (2, "a picture of before")
    remove, anew = again.stderr.split("next: ")[1].partition("    ")[0].split(" && ")
    assert remove == f"rm {file}"
    file.unlink()
    assert surgeon(*shlex.split(anew)[1:]).exit_code == 0
    assert file.read_bytes().startswith(b"<?xml")
    assert surgeon("report", "-C", diverged, "-o", diverged / "run.gif").exit_code == 2


# --- bad input -----------------------------------------------------------------------------------


def test_logs_of_a_restart_whose_clock_ran_backwards(surgeon: Surgeon, tmp_path: Path) -> None:
    """Steps 1 to 300, then 200 on again, with times of a day before."""
    first = write_log(tmp_path / "tb", spiked(300, at=1000))
    data = first.read_bytes()
    second = tmp_path / "tb" / "events.out.tfevents.1600000000.host.2.0"
    write_log(tmp_path / "other", spiked(200, at=1000), first=200)
    second.write_bytes(next((tmp_path / "other").iterdir()).read_bytes())
    done = surgeon("advise", "--tb", tmp_path / "tb")
    assert done.exit_code in (0, 1) and "Traceback" not in done.output
    assert first.read_bytes() == data


def test_damaged_records_are_left_out_and_named(surgeon: Surgeon, tmp_path: Path) -> None:
    path = write_log(tmp_path / "tb", spiked())
    data = bytearray(path.read_bytes())
    index = event_file.scan(path)
    data[index.offsets[100] + 20] ^= 0xFF
    path.write_bytes(data)
    told = answer(surgeon, "--tb", tmp_path / "tb")
    assert told["onset"] == 250 and any("damaged bytes" in note for note in told["notes"])


def test_a_tag_that_only_one_branch_has(surgeon: Surgeon, tmp_path: Path) -> None:
    write_log(tmp_path / "tb", spiked(300, at=1000))
    write_log(tmp_path / "tb", [0.5] * 100, tag="grad-norm/grad-norm")
    assert answer(surgeon, "--tb", tmp_path / "tb")["verdict"] == "healthy"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("log.csv", "step,loss\n1,2.5\n", "and the log has 1"),
        ("log.csv", "step,loss\nx,y\n,,,\n\0\n3,nan\n", "and the log has 1"),
        ("log.txt", "\x1b[31m iteration 3/ 5 | lm loss: 1.0E+00 |\n", "and the log has 1"),
        (
            "state.json",
            '{"log_history": [{"step": 3, "loss": 1.0}, 7, {"loss": 2}]}',
            "and the log has 1",
        ),
    ],
)
def test_poor_files_are_never_a_verdict(
    surgeon: Surgeon, tmp_path: Path, name: str, content: str, says: str
) -> None:
    (tmp_path / name).write_text(content)
    done = surgeon("advise", "--log", tmp_path / name)
    assert done.exit_code == 0, done.stderr
    assert "unknown" in done.stdout and says in done.stdout


@pytest.mark.parametrize(
    ("name", "content", "says", "next"),
    [
        ("log.csv", "step,loss\n", "no row of it has a step", ""),
        ("log.jsonl", '{"step": 1}\n[\n{"step": "a", "loss": 1}\n', "step", ""),
        ("log.jsonl", '{"step": 1e400, "loss": 1}\n{"step": true, "loss": 2}\n', "step", ""),
        ("log.txt", "", "is empty", ""),
        ("log.txt", "nothing here\n", "no line of it is understood", ""),
        ("log.csv", "step,nll\n1,2.5\n", "it has nll", "--tag loss=nll"),
        ("log.csv", "when,loss\n1,2.5\n2,2.4\n", "it has when, loss", "--step"),
        ("log.csv", 'when,"my, nll"\n"1",2.5\n', "it has when, my, nll", "--tag 'loss=my, nll'"),
        ("log.txt", "step=1 nll=7.9\nstep=2 nll=7.8\n", "it has nll", "--tag loss=nll"),
        ("log.csv", 'Step,a - loss,b - loss\n1,2,3\n', "a - loss, b - loss", "loss=b - loss"),
    ],
)  # fmt: skip
@pytest.mark.long
def test_a_file_without_a_known_loss_is_refused_with_what_it_has(
    surgeon: Surgeon, tmp_path: Path, name: str, content: str, says: str, next: str
) -> None:
    (tmp_path / name).write_text(content)
    for command in (("advise",), ("report", "-o", tmp_path / "run.svg")):
        done = surgeon(*command, "--log", tmp_path / name)
        assert done.exit_code == 2 and says in done.stderr and next in done.stderr, done.stderr
    assert not (tmp_path / "run.svg").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--log", "nowhere.csv"), "can't be read"),
        (("--log", "{folder}"), "can't be read"),
        (("--log", "{folder}/bad.json"), "no log_history"),
        (("--tb", "nowhere"), "is not a directory"),
        (("--tb", "{folder}"), "no event file"),
        (("--tb", "{folder}", "--rule", "7sigma"), "is not known"),
        (("--tb", "{folder}", "--order", "luck"), "luck"),
        (("--tb", "{folder}", "--tag", "loss"), "SIGNAL=NAME"),
        ((), "no training run"),
    ],
)
def test_bad_input_is_one_sentence(
    surgeon: Surgeon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("[")
    given = [word.format(folder=tmp_path) for word in words]
    for command in (("advise",), ("report", "-o", "run.svg")):
        done = surgeon(*command, *given)
        assert done.exit_code == 2 and says in done.stderr, done.stderr
    assert not (tmp_path / "run.svg").exists()


def test_a_run_without_logs(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    for path in (root / "tensorboard").glob("*tfevents*"):
        path.unlink()
    assert "unknown: no logs were found" in surgeon("advise", "-C", root).stdout
    done = surgeon("report", "-C", root, "-o", root / "run.svg")
    assert done.exit_code == 1 and "nothing to draw" in done.stderr
    assert surgeon("doctor", "-C", root).exit_code == 0


def test_a_log_of_nothing_but_a_version(surgeon: Surgeon, tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1700000000.host.1.0").write_bytes(
        event_file.version_record(1.7e9) + frame.frame(b"")[:7]
    )
    assert "unknown" in surgeon("advise", "--tb", tmp_path).stdout
