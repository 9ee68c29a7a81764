"""The command `lightning-solo`: one file per sub-command, imported when the sub-command runs."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_solo.errors import SoloError, nearest
from lightning_solo.presets.spelling import on_command_line
from lightning_solo.secret_values import print_error, without_secrets

INTERRUPTED = 130
TERMINATED = 143
COMMANDS = {
    "train": "train a model under a preset (a Hydra application: key=value overrides, -m sweeps)",
    "plan": "predict memory and time without training: lightning-solo plan model=byte_gpt_7b --device rtx-4090",
    "ladder": "measure memory, time and loss of each technique on your model: lightning-solo ladder --until 16GiB",
    "results": "list sweeps, or print one as a table or CSV: lightning-solo results runs/first --sort loss",
    "presets": "list the presets, each with its purpose and its device",
    "show": "print a preset as composed: lightning-solo show checkpointing +callback=throughput",
    "report": "draw a run, a sweep or a ladder in one HTML page: lightning-solo report runs/first",
    "export": "write the weights of a run or a checkpoint as one plain file: lightning-solo export runs/first",
    "generate": 'print the answer of a fine-tuned model: lightning-solo generate runs/first "What is LoRA?"',
    "predict": "write a run's predictions for each row of its data: lightning-solo predict runs/first",
    "soft-labels": "store a teacher's predictions for the training data: lightning-solo soft-labels FILE runs/teacher",
    "convert": "make a plain checkpoint of a compact one, or back: lightning-solo convert last.ckpt --to plain",
    "doctor": "print what this machine has and what each preset lacks here; --build compiles DeepSpeed's extensions",
}

WITH_USER_CODE = ("train", "plan", "ladder", "export", "predict", "soft-labels")
"""Commands that may import the user's modules from the current folder."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sub-command that is the first argument, and exit.

    Exits with 0 (done), 1 (failed), 2 (refused), 130 or 143 (interrupted or terminated).
    """
    rest = list(sys.argv[1:] if arguments is None else arguments)
    name = rest.pop(0) if rest else "--help"
    if name in ("-h", "--help", "help"):
        print(_usage())
        raise SystemExit(0)
    if name == "--version":
        import lightning_solo

        print(lightning_solo.__version__)
        raise SystemExit(0)
    if name not in COMMANDS:
        refuse(f"no command {name!r}{nearest(name, COMMANDS)}there are {', '.join(COMMANDS)}")
    if arguments is None:
        warnings.showwarning = _show_warning
        sys.excepthook = print_error
    try:
        command = importlib.import_module(f"lightning_solo.cli.{name.replace('-', '_')}")
        if name in ("show", "presets", "doctor") and {"-h", "--help"} & {*rest}:  # the others have options to list
            print(command.__doc__)
            raise SystemExit(0)
        if name in WITH_USER_CODE:
            sys.path.insert(0, str(Path.cwd()))  # as `python -m` does; a console script lacks it
        code = command.run(rest)
    except SoloError as error:
        refuse(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    raise SystemExit(code)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Print a warning; name the source file only if it belongs to another package or to the user."""
    path = Path(filename)
    standard = path.is_relative_to(sysconfig.get_path("stdlib")) and "site-packages" not in path.parts
    ours = standard or "lightning_solo" in path.parts or filename == sys.argv[0]
    where = "" if ours else f"{filename}: "
    print(
        f"lightning-solo: {where}{category.__name__}: {on_command_line(without_secrets(str(message)))}", file=sys.stderr
    )


def _usage() -> str:
    lines = "\n".join(f"  {name:<12}{text}" for name, text in COMMANDS.items())
    return f"lightning-solo: the largest model, at the best speed, on the one GPU you have\n\n{lines}"


def refuse(message: str) -> NoReturn:
    """Print the reason for a refusal, and exit with 2."""
    print(f"lightning-solo: {on_command_line(without_secrets(message))}", file=sys.stderr)
    raise SystemExit(2)
