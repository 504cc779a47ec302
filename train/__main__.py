"""`python -m train`: train from a config, prepare data, or build the kernels."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from . import distributed
from .config import RUN_CONFIG, Config, dump_config, load_config
from .errors import RankError, TrainError
from .run_folder import find_checkpoint, live_marker, refuse_live_trainer, write_atomically


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. A TrainError becomes three lines on stderr and its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # torch reads it once, at its first allocation: large tensors in huge pages, which Linux gives
    # to those that ask, are read at twice the rate.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        if arguments[:1] == ["prepare-data"]:
            return _prepare_data(arguments[1:])
        if arguments[:1] == ["universal"]:
            return _universal(arguments[1:])
        if arguments[:1] == ["build-kernels"]:
            return _build_kernels(arguments[1:])
        return _train(arguments)
    except TrainError as e:
        if isinstance(e, RankError) or os.environ.get("RANK", "0") == "0":
            print(e.render(), file=sys.stderr)
        _leave(e.exit_code)
    except KeyboardInterrupt:
        _leave(130)
    except SystemExit as e:
        _leave(e.code if isinstance(e.code, int) else 0)
    except Exception:
        traceback.print_exc()
        _leave(1)
    return 1


def _train(arguments: Sequence[str]) -> int:
    options = _train_parser().parse_intermixed_args(arguments)
    # As an exception, so that the live marker goes when a scheduler or the surgeon ends the run.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    distributed.complete_environment()
    say = _take_stdout()
    overrides = list(options.overrides)
    if options.train_iters is not None:
        overrides.append(f"train_iters={options.train_iters}")
    config = load_config(options.config, overrides)
    checkpoint = find_checkpoint(Path(config.save), options.from_scratch)
    if options.universal and checkpoint is not None:
        from .universal_source import find_universal

        checkpoint = find_universal(checkpoint)
    with ExitStack() as stack:
        if distributed.rank() == 0:
            if options.exit_after_first_line:
                refuse_live_trainer(Path(config.save))
            else:
                if not Path(config.save).exists():
                    Path(config.save).mkdir(parents=True)
                    stack.callback(_remove_empty, Path(config.save))
                stack.enter_context(live_marker(Path(config.save)))
        _run(config, checkpoint, say, options)
    distributed.finish()


def _remove_empty(folder: Path) -> None:
    """A start that was refused leaves no folder behind."""
    with suppress(OSError):
        folder.rmdir()


def _run(
    config: Config,
    checkpoint: Path | None,
    say: Callable[[str], None],
    options: argparse.Namespace,
) -> None:
    device = distributed.start(config.threads)
    from . import trainer  # after `start`, which chooses DeepSpeed's accelerator
    from .device import full_memory_told

    # DeepSpeed looks for garbage three times while it starts with bf16: modules are none.
    gc.freeze()
    with full_memory_told():
        training = trainer.prepare(config, checkpoint, device)
    line = trainer.first_line(training)
    say(line)
    if checkpoint is not None and distributed.rank() == 0:
        trainer.warn(trainer.differences(training))
    if options.exit_after_first_line:
        return
    if options.confirm and not distributed.confirmed():
        raise TrainError(
            "the first line was not confirmed with `go` on stdin",
            untouched="no step was trained",
            next="start without --confirm",
        )
    if distributed.rank() == 0:
        # Only now: a start that was refused must not change what the next relaunch reads.
        write_atomically(Path(config.save) / RUN_CONFIG, dump_config(config))
    trainer.announce(training, say)
    with full_memory_told():
        trainer.train(training, say)


def _take_stdout() -> Callable[[str], None]:
    """Keep stdout for the trainer's own lines; libraries and compilers write to stderr instead."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    if distributed.rank() == 0:
        return lambda text: print(text, file=own, flush=True)
    return lambda text: None


def _leave(code: int) -> None:
    """Exit at once: a process group that lost a rank would hang the ordinary way out."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _train_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train",
        description="Train a GPT. On resume the checkpoint wins over the config. "
        "See also: python -m train prepare-data --help, python -m train build-kernels, "
        "python -m train universal --help",
    )
    parser.add_argument("--config", required=True, type=Path, help="YAML file")
    parser.add_argument("--from-scratch", action="store_true", help="start with random weights")
    parser.add_argument(
        "--universal",
        action="store_true",
        help="resume from what `python -m train universal` has made, on any number of ranks",
    )
    parser.add_argument("--train-iters", type=int, help="the same as train_iters=N")
    parser.add_argument(
        "--exit-after-first-line",
        action="store_true",
        help="load, print what the next step would use, change nothing",
    )
    parser.add_argument(
        "--confirm",
        action="store_true",
        help="train only after `go` on stdin: whoever started it has read the first line",
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="config overrides")
    return parser


def _universal(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train universal",
        description="Convert the checkpoint that `latest` names, so that --universal can resume it "
        "on another number of data, tensor or pipeline ranks.",
    )
    parser.add_argument("--config", required=True, type=Path, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="config overrides")
    options = parser.parse_intermixed_args(arguments)
    distributed.complete_environment()
    say = _take_stdout()
    config = load_config(options.config, options.overrides)
    distributed.start(config.threads)
    from .universal import convert

    say(str(convert(config)))
    distributed.finish()


def _prepare_data(arguments: Sequence[str]) -> int:
    from .prepare_data import prepare_data

    parser = argparse.ArgumentParser(prog="python -m train prepare-data")
    parser.add_argument("--output", required=True, help="prefix of the .bin and .idx")
    parser.add_argument("--tokenizer", default="byte", help="byte, or a tokenizers JSON file")
    parser.add_argument("--pydoc", action="store_true", help="Python's own manual as the text")
    parser.add_argument("files", nargs="*", help="text files, one document each")
    options = parser.parse_intermixed_args(arguments)
    prepare_data(options.output, options.tokenizer, options.files, options.pydoc)
    return 0


def _build_kernels(arguments: Sequence[str]) -> int:
    from .kernels.build import CannotBuildError, build, forget_failure

    argparse.ArgumentParser(
        prog="python -m train build-kernels",
        description="Compile the native kernels now; the first run would do it otherwise.",
    ).parse_args(arguments)
    try:
        forget_failure()
        print(build())
    except (CannotBuildError, OSError) as e:
        raise TrainError(
            f"the native kernels can't be built: {e}",
            next="training works without them, slower: plain torch computes",
        ) from e
    return 0


if __name__ == "__main__":
    sys.exit(main())
