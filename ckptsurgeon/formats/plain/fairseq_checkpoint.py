"""One saved step of a metaseq or fairseq run: what its files keep, and what only its flags say.

Source: `trainer.py` (`state_dict`, `load_checkpoint`) and `optim/` of metaseq f7ffa5f, and of
fairseq 0.12.2, which resumes in tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats.capabilities import CountsMore, SkipsByFlag
from ckptsurgeon.formats.fields import skipped
from ckptsurgeon.formats.fields.understood import mapping, understood
from ckptsurgeon.formats.fields.values import NUMBER, UNSET, Decay, Part, Place, Setting
from ckptsurgeon.formats.plain import flat_parameters
from ckptsurgeon.formats.plain.checkpoint import TorchCheckpoint
from ckptsurgeon.formats.plain.flat_parameters import Flat
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key
from ckptsurgeon.plans.promise import Caveat

OPTIMIZER = "last_optimizer_state"
EMBEDDING, HEAD = "decoder.embed_tokens.weight", "decoder.output_projection.weight"
SHARE = "share_decoder_input_output_embed"
POLYNOMIAL = "polynomial_decay"
ZERO = "zero_lr_warmup_steps"
"""Of metaseq's: how many updates come before its warm-up, with a rate of 0."""
TUNE = "--finetune-from-model"
LAST = "checkpoint_last.pt"
"""What these trainers load where --restore-file says nothing else."""
FLAGS = {
    "lr": "--lr", "warmup": "--warmup-updates", "decay": "--total-num-update",
    "min_lr": "--end-learning-rate", "decay_style": "--lr-scheduler",
}  # fmt: skip
"""Those of polynomial_decay; every schedule has the first, and most the second."""
OF_COSINE = {**FLAGS, "decay": "--lr-period-updates", "min_lr": "--min-lr"}
STYLES = {"linear": POLYNOMIAL, "constant": "fixed"}
"""Of recipes → of these trainers, where they differ."""


@dataclass
class FairseqCheckpoint(TorchCheckpoint, CountsMore, SkipsByFlag):
    """The shards of one number of updates, and those of `checkpoint_last` if they are copies."""

    @property
    def groups_win(self) -> bool:
        """The lr of the groups is not used where a load sets it from the flags and num_updates."""
        return self.keeps_lr()

    def keeps_lr(self) -> bool:
        """Whether a load leaves the lr of the groups: with fairseq's reduce_lr_on_plateau, once
        its warm-up is over."""
        warmup = self.argument("lr_scheduler", "warmup_updates")
        plateau = self._scheduler() == "reduce_lr_on_plateau"
        return plateau and (not warmup or self.iteration() > warmup)

    def _scheduler(self) -> Any:
        """The name of the schedule that the saved run was started with."""
        return self.argument("lr_scheduler", "_name") or self.argument("", "lr_scheduler")

    @property
    def of_fairseq(self) -> bool:
        """Its configs alone have `bmuf`; metaseq's are those of a part of it."""
        return self.argument("bmuf", "block_lr") is not None

    @property
    def tuned_from(self) -> str:
        """The model that the run was told to begin with. Where it is told to load a file as well,
        the trainer ends with an error."""
        return str(self.argument("checkpoint", "finetune_from_model") or "")

    @property
    def asked(self) -> bool:
        """fairseq was, by tests. metaseq was by hand alone."""
        return self.of_fairseq

    def iteration(self) -> int:
        """`num_updates` of the last entry of optimizer_history."""
        return int(updates(next(iter(self.trees.values()))))

    def further_counters(self) -> list[tuple[str, Place]]:
        """num_updates of the last entry of optimizer_history, and where the data goes on."""
        out = []
        for file, tree in self.trees.items():
            last = len(tree["optimizer_history"]) - 1
            out += self.at(file, ("optimizer_history", last, "num_updates"))
            for key in ("epoch", "iterations_in_epoch", "sequences_consumed"):
                out += self.at(file, ("extra_state", "train_iterator", key))
        return [(str(place.path[-1]), place) for place in out]

    def with_skipped(self, ranges: Sequence[skipped.Range], step: int) -> list[skipped.Range]:
        """By metaseq's --skip-batches, which counts updates."""
        saved = self.argument("dataset", "skip_batches")
        return skipped.with_uncounted(ranges, skipped.uncounted(str(saved or ""), step))

    def argument(self, section: str, name: str) -> Any:
        """A flag of the run that saved this, from its `cfg` or the older `args`."""
        first = next(iter(self.trees))
        paths: list[tuple[Key, ...]] = [("cfg", section, name), ("cfg", name), ("args", name)]
        values = (self.value(first, path) for path in paths)
        return next((value for value in values if value is not None), None)

    # --- elements --------------------------------------------------------------------------------

    def weight_parts(self) -> Iterator[Part]:
        """Without buffers that hold no number, and what modules share under one name: a load gives
        the model the last of its copies, so all must be edited alike."""
        shared = self._shared()
        for part in super().weight_parts():
            if not part.parameter.endswith(UNSET):
                yield part._replace(parameter=shared.get(part.parameter, part.parameter))

    def _shared(self) -> Mapping[str, str]:
        """Names in a model → the one that its parameter has, by the flags that share embeddings."""
        if self.argument("model", "share_all_embeddings"):
            return dict.fromkeys((EMBEDDING, HEAD), f"en{EMBEDDING[2:]}")
        return {HEAD: EMBEDDING} if self.argument("model", SHARE) else {}

    def parts(self) -> list[Part]:
        """Those inside flat parameters by their names, where the files say these."""
        found = super().parts()
        with understood(self.path):
            known = {file: flat_parameters.flats(tree) for file, tree in self.trees.items()}
            out: list[Part] = []
            for part in self._in_order(found, known):
                flat = known[part.place.file].get(part.parameter)
                out += [part] if flat is None else flat_parameters.pieces(part, flat)
        return out

    def _in_order(
        self, found: Sequence[Part], known: Mapping[Path, Mapping[str, Flat]]
    ) -> Iterator[Part]:
        """With the moments of flat parameters by the names of these: metaseq hands all parameters
        to its optimizer as one group, in the order of the model (`Trainer._build_optimizer`)."""
        names: dict[tuple[Path, str], str] = {}
        for file, base in self.optimizers:
            flat = [
                part
                for part in found
                if part.kind == "weights" and part.place.file == file
                and part.parameter in known[file]
            ]  # fmt: skip
            groups = get(self.trees[file], (*base, "param_groups"))
            if len(groups) == 1 and list(groups[0]["params"]) == list(range(len(flat))):
                names |= {(file, f"{NUMBER}{i}"): part.parameter for i, part in enumerate(flat)}
        sizes = {(p.place.file, p.parameter): p.end for p in found if p.kind == "weights"}
        alike = all(
            sizes[p.place.file, names[key]] == p.end
            for p in found
            if (key := (p.place.file, p.parameter)) in names
        )
        for part in found:
            name = names.get((part.place.file, part.parameter)) if alike else None
            yield part if name is None else part._replace(parameter=name)

    def fragments(self, name: str) -> list[Part]:
        """Of `parts`, where these have names, and in copies of the shards too."""
        found = [part for part in self.parts() if part.kind == name]
        if not found or any(part.parameter.startswith(NUMBER) for part in found):
            return super().fragments(name)
        out = [*found]
        for copy, shard in self.repeated.items():
            for part in found:
                if part.place.file == shard:
                    (place,) = self.at(copy, part.place.path)
                    out.append(part._replace(place=place))
        return out

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """`--fp16-init-scale` of the saved flags."""
        start = self.argument("common", "fp16_init_scale")
        if start is None:
            raise SurgeryError(
                "the saved flags have no fp16_init_scale, so the first loss scale is not known",
                next=command("set", "loss_scale=N", why="with the scale that you want"),
            )
        return [(place, start) for place in self.locate("loss_scale")]

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """Refused where the schedule is a function of the flags and of num_updates alone."""
        if self.keeps_lr() and set(values) == {"lr"}:
            return [Setting("lr", place, values["lr"]) for place in self.locate("lr")], []
        flags = " ".join(self._flags(values))
        raise SurgeryError(
            "this trainer computes its learning rate from its flags at every load; what the "
            f"checkpoint keeps of {', '.join(values)} is never read",
            next=(
                f"relaunch the trainer with {flags}",
                "the same checkpoint is restored: --restore-file, without --reset-optimizer and "
                f"--reset-lr-scheduler{f', and without {TUNE}' if self.tuned_from else ''}",
            ),
        )

    def _flags(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Those that make the schedule have `values`: of another one, where its own has no end."""
        style = values.get("decay_style")
        name = self._scheduler() if style is None else STYLES.get(style, style)
        if {"decay", "min_lr"} & values.keys() and name not in (POLYNOMIAL, "cosine"):
            name = POLYNOMIAL
        if name == "fixed" and not self.of_fairseq:  # metaseq's decay may end where it begins
            peak = values.get("lr", self._peak() or max(self.rates(), default=0.0))
            name, values = POLYNOMIAL, {**values, "min_lr": peak}
        if name != self._scheduler():
            yield f"{FLAGS['decay_style']} {name}"
        known = OF_COSINE if name == "cosine" else FLAGS
        for key, value in values.items():
            if key == "decay" and name == "cosine":  # a period begins after the warm-up
                warmup = values.get("warmup", self.argument("lr_scheduler", "warmup_updates"))
                value -= warmup or 0
            if key != "decay_style":
                yield f"{known[key]} {value}"

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """Refused with the flags that do it: polynomial_decay goes down from the update at which
        its warm-up ends."""
        now, rates = self.iteration(), self.rates()
        if decay.shape != "linear" or not rates:
            raise SurgeryError(
                f"no schedule of this trainer decays {decay.shape} from an update on",
                next=command("cooldown", "--shape", "linear"),
            )
        zero = " --zero-lr-warmup-steps 0" if self.argument("lr_scheduler", ZERO) else ""
        raise SurgeryError(
            "this trainer computes its learning rate from its flags at every load",
            next=(
                f"relaunch the trainer with --lr-scheduler {POLYNOMIAL} --power 1 --lr "
                f"{max(rates)!r} --warmup-updates {now} {FLAGS['decay']} {now + decay.steps} "
                f"{FLAGS['min_lr']} {decay.to!r}{zero}"
            ),
        )

    def in_words(self) -> tuple[str, float | None]:
        """The flags that the run was started with; the peak is an --lr for all epochs."""
        name = self._scheduler()
        warmup = self.argument("lr_scheduler", "warmup_updates")
        total = self.argument("lr_scheduler", "total_num_update")
        words = [str(name)] if isinstance(name, str) else []
        words += [] if warmup is None else [f"warmup {count(warmup, 'update')}"]
        words += [] if total is None else [f"to update {total:g}"]
        return f"{', '.join(words) or 'a schedule'}: by the flags of each start", self._peak()

    def _peak(self) -> float | None:
        rates = self.argument("optimization", "lr")
        one = isinstance(rates, list) and len(rates) == 1 and not self.keeps_lr()
        return float(rates[0]) if one else None

    def notes(self) -> Iterator[str]:
        """The lr is not the checkpoint's; nor is what a flag of the saved run replaces."""
        if not self.keeps_lr():
            text = "lr is what the saved run used next; the flags of the relaunch decide (--lr)"
            yield Caveat(text, "lr", known=False)
        if self.argument("checkpoint", "reset_optimizer"):
            yield (
                "the run was started with --reset-optimizer: relaunch without it, or nothing of "
                "the optimizer is loaded"
            )
        if self.argument("checkpoint", "reset_dataloader"):
            yield (
                "the run was started with --reset-dataloader: relaunch without it, or the data "
                "begins anew"
            )
        restored = self.argument("checkpoint", "restore_file")
        if isinstance(restored, str) and restored != LAST:
            yield (
                f"the run was started with --restore-file {restored[-80:]}: a relaunch with it "
                "loads that again, so leave it out or name what it should load"
            )
        if self.tuned_from:
            yield (
                f"the run was started with {TUNE} {self.tuned_from[-80:]}: relaunch without it, as "
                "the trainer takes no --restore-file beside it, and begins anew from that model "
                "where there is no checkpoint_last"
            )
        overrides = self.argument("checkpoint", "optimizer_overrides")
        if isinstance(overrides, str) and overrides.strip() not in ("", "{}"):
            yield (
                f"the run was started with --optimizer-overrides {overrides[:80]!r}: a load writes "
                "that into every param group, so relaunch without it or with the wanted values"
            )

    def contradictions(self) -> list[str]:
        """Also shards of different numbers of updates."""
        sentences = super().contradictions()
        counts = {path.name: updates(tree) for path, tree in self.trees.items()}
        first = next(iter(counts.values()))
        sentences += [
            f"{name}: was saved after {count(number, 'update')}, and the other shards after {first}"
            for name, number in counts.items()
            if number != first
        ]
        return sentences


def links_last(tree: Any) -> bool:
    """Whether the trainer that saved a file makes `checkpoint_last*` links: metaseq since 2023."""
    return "local_save_interval_updates" in mapping(mapping(tree.get("cfg")).get("checkpoint"))


def updates(tree: Any) -> int:
    """After how many updates a file was saved. Raises LookupError or TypeError for another file."""
    return int(tree["optimizer_history"][-1]["num_updates"])
