"""The command `lightning-solo`: one file per sub-command, imported when it is called."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning_solo.errors import SoloError, nearest

INTERRUPTED = 130
TERMINATED = 143
COMMANDS = {
    "train": "train a model under a preset (a Hydra application: key=value overrides, -m sweeps)",
    "plan": "what would fit, and where, without training: lightning-solo plan model=byte_gpt_7b --device rtx-4090",
    "ladder": "memory, time and loss of each technique on your own model: lightning-solo ladder --until 16GiB",
    "results": "the sweeps here, or the jobs of one as a table or CSV: lightning-solo results runs/first --sort loss",
    "presets": "list the presets: what each is for and which device it needs",
    "show": "print a preset as composed: lightning-solo show checkpointing +callback=throughput",
    "report": "pictures of a run, a sweep or a ladder in one HTML page: lightning-solo report runs/first",
    "doctor": "what this machine has, and what each preset lacks here; --build compiles DeepSpeed's extensions ahead",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sub-command named first on the command line and exit.

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
    try:
        command = importlib.import_module(f"lightning_solo.cli.{name}")
        if name in ("show", "presets", "doctor") and {"-h", "--help"} & {*rest}:  # the others have options to list
            print(command.__doc__)
            raise SystemExit(0)
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
    """Print a warning without the line of source that gave it, where that is this package's."""
    ours = os.sep + "lightning_solo" + os.sep in filename
    where = "" if ours else f"{filename}: "
    print(f"lightning-solo: {where}{category.__name__}: {message}", file=sys.stderr)


def _usage() -> str:
    lines = "\n".join(f"  {name:<9}{text}" for name, text in COMMANDS.items())
    return f"lightning-solo: the largest model, at the best speed, on the one GPU you have\n\n{lines}"


def refuse(message: str) -> NoReturn:
    """Print why the command is refused, and exit with 2."""
    print(f"lightning-solo: {message}", file=sys.stderr)
    raise SystemExit(2)
