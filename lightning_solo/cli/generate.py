"""`lightning-solo generate RUN|FILE "prompt"`: prints the answer of a fine-tuned language model, token by token."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_solo.cli.options import Parser, positive
from lightning_solo.errors import CheckpointError

TAKES = 'write: lightning-solo generate RUN|FILE "prompt" [--best] [--raw] [--max-tokens 256] [--base-folder FOLDER]'


def run(arguments: Sequence[str]) -> int:
    """Print the answer."""
    options = parse(arguments)
    tokens = positive("--max-tokens", options.max_tokens, 256)
    import torch

    from lightning_solo.export.sources import checkpoint_of
    from lightning_solo.fine_tuning.samples import answer, prompt_ids
    from lightning_solo.fine_tuning.trained import load_trained

    file = checkpoint_of(options.source)
    file = best_of(file) if options.best else file
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module, tokenizer = load_trained(file, device, options.base_folder)
    from transformers import TextStreamer

    if options.raw:
        tokenizer.chat_template = None
    ids = prompt_ids(tokenizer, options.prompt)
    answer(module.model, tokenizer, ids, tokens, TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options.

    Raises:
        PresetError: an unknown option, or no prompt.
    """
    parser = Parser("generate", (__doc__ or "").splitlines()[0], TAKES)
    parser.add_argument("source", type=Path, metavar="RUN|FILE", help="the folder of a run, or a checkpoint")
    parser.add_argument("prompt", help="the user's turn, or the start of a text after data=text")
    parser.add_argument("--best", action="store_true", help="the checkpoint with the lowest loss, not the last one")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as plain text, without chat template")
    parser.add_argument("--max-tokens", default="256", metavar="N", help="the largest length (default %(default)s)")
    parser.add_argument("--base-folder", type=Path, metavar="FOLDER", help="the base model, if it isn't where it was")
    return parser.parse_args(arguments)


def best_of(last: Path, option: str = "--best") -> Path:
    """Return the checkpoint that a run's last one names as the best.

    Raises:
        CheckpointError: it names none, or the file is gone.
    """
    from lightning_solo.export.sources import read

    states = read(last, inert=True).get("callbacks", {}).values()
    named = [Path(state["best_model_path"]).name for state in states if state.get("best_model_path")]
    if not named:
        raise CheckpointError(f"{last}: its run has kept no best checkpoint; drop {option}")
    if not last.with_name(named[0]).is_file():
        raise CheckpointError(f"{last}: its best checkpoint {named[0]} isn't there; drop {option}")
    return last.with_name(named[0])
