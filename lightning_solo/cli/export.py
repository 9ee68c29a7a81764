"""`lightning-solo export RUN|FILE --format weights|hf|gguf|onnx|...`: writes what others read."""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lightning_solo.cli.options import Parser, positive
from lightning_solo.errors import PresetError, nearest
from lightning_solo.export.formats import BASES, DTYPES, FORMATS

TAKES = (
    "write: lightning-solo export RUN|FILE [--format weights|hf|adapter|gguf|pruned|quantized|factorized|onnx|"
    "torch_export] [--output PATH] [--force]; of the first five [--dtype fp32|bf16|fp16]; of the first seven [--live];"
    " of hf, adapter and gguf [--base-folder FOLDER] [--tokenizer FOLDER]; of hf and gguf [--base"
    " dequantized|original]; of hf [--shard-size 5GB] [--bits 4|8]; of gguf [--llama-cpp FOLDER] [--quantize q4_k_m];"
    " of quantized [--bits 4|fp8] [--group-size 32] [--activations int8|int8_static] [--calibration-batches 16]"
    " [--layers PATTERN,...]; of factorized [--rank 64] [--layers PATTERN,...]; of onnx and torch_export [--batch"
    " 1:1024] [--length 1:512]; of these and pruned [--allow PREFIX]"
)
_CHOICES = {"format": tuple(FORMATS), "dtype": DTYPES, "base": BASES}


def run(arguments: Sequence[str]) -> int:
    """Write the export and print lines about it."""
    options = vars(parse(arguments))
    source, format = options.pop("source"), options.pop("format")
    write = pkgutil.resolve_name(FORMATS[format].target)
    print("\n".join(write(source, format=format, overwrite=options.pop("force"), **options)))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the source, the format, whether to replace an output, and those other options that are written.

    Raises:
        PresetError: an unknown option, format or type; or an option that the format doesn't take.
    """
    parser = Parser("export", (__doc__ or "").splitlines()[0], TAKES)
    parser.add_argument("source", type=Path, metavar="RUN|FILE", help="the folder of a run, or a checkpoint")
    parser.add_argument("--format", default="weights", help=f"one of {', '.join(FORMATS)}")
    parser.add_argument(
        "--output", type=Path, metavar="PATH", help="a file or folder; by default beside the checkpoint"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    others = parser.add_argument_group("options of some formats")
    others.add_argument(
        "--dtype", metavar="|".join(DTYPES), help="the type of the weights; by default fp32, or the base's"
    )
    others.add_argument(
        "--base", metavar="|".join(BASES), help="the weights in 4 or 8 bits to which an adapter is added"
    )
    others.add_argument("--base-folder", type=Path, metavar="FOLDER", help="the base model, if it isn't where it was")
    others.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="the tokenizer, if tokens were added")
    others.add_argument("--shard-size", metavar="SIZE", help="the largest size of a file, by default 5GB")
    others.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="llama.cpp; by default $LLAMA_CPP or the path")
    others.add_argument("--quantize", metavar="TYPE", help="a type of llama.cpp's, such as q4_k_m")
    others.add_argument("--bits", metavar="N", help="of a weight: 4 or 8 of hf; 2 to 8, or fp8, of quantized")
    others.add_argument("--group-size", metavar="N", help="weights that share a scale; 0: a row; by default 32")
    others.add_argument(
        "--activations", metavar="int8|int8_static", help="inputs of layers are rounded too, by token or fixed scales"
    )
    others.add_argument("--calibration-batches", metavar="N", help="that give int8_static its scales; by default 16")
    others.add_argument(
        "--rank", metavar="N", help="of a run without factors: a whole number, or a share of the energy"
    )
    others.add_argument("--layers", metavar="PATTERN,...", help="names of layers; by default all but output heads")
    others.add_argument("--allow", metavar="PREFIX,...", help="code to trust")
    others.add_argument(
        "--live", action="store_true", default=None, help="the trained weights, where there is an average of them"
    )
    others.add_argument("--batch", metavar="MIN:MAX", help="rows that a graph takes, by default 1:1024; N fixes them")
    others.add_argument("--length", metavar="MIN:MAX", help="second dimension of a graph's inputs, by default fixed")
    options = parser.parse_args(arguments)
    for name, allowed in _CHOICES.items():
        value = getattr(options, name)
        if value is not None and value not in allowed:
            raise PresetError(f"--{name} {value}{nearest(value, allowed)}there are {', '.join(allowed)}")
    for name in ("bits", "group_size", "calibration_batches"):
        if (value := getattr(options, name)) not in (None, "fp8"):
            is_row = value == "0" and name == "group_size"
            setattr(options, name, 0 if is_row else positive(f"--{name.replace('_', '-')}", value, 32))
    if (rank := getattr(options, "rank", None)) is not None:
        options.rank = _rank(rank)
    for name in ("layers", "allow"):
        if (value := getattr(options, name)) is not None:
            setattr(options, name, value.split(","))
    always = ("source", "format", "output", "force")
    written = {name: value for name, value in vars(options).items() if value is not None or name in always}
    if other := [name for name in written if name not in (*always, *FORMATS[options.format].options)]:
        takers = [name for name, each in FORMATS.items() if other[0] in each.options]
        option = f"--{other[0].replace('_', '-')}"
        raise PresetError(
            f"{option} and --format {options.format}: drop {option}, or write --format {' or '.join(takers)},"
            " which take it"
        )
    return argparse.Namespace(**written)


def _rank(text: str) -> int | float:
    """Return a rank, or a share of the energy."""
    with suppress(ValueError):
        value = int(text) if text.isdigit() else float(text)
        if (isinstance(value, int) and value >= 1) or 0 < value < 1:
            return value
    raise PresetError(f"--rank {text}: write a whole number of at least 1, or a share above 0 and below 1")
