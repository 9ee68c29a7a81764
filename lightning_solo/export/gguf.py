"""GGUF files by the user's own llama.cpp, from the exported folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_solo.errors import CapabilityError, PresetError, nearest

CONVERT, QUANTIZE = "convert_hf_to_gguf.py", "llama-quantize"
VARIABLE = "LLAMA_CPP"
"""Variable of the environment with the folder of llama.cpp."""
TYPES = {None: "auto", "fp32": "f32", "bf16": "bf16", "fp16": "f16"}
"""Type of an export -> the converter's ``--outtype``."""
_BUILD = "cmake -S llama.cpp -B llama.cpp/build && cmake --build llama.cpp/build --target llama-quantize"


class LlamaCpp(NamedTuple):
    """The paths of the converter and of the program that quantizes, which is None if none was asked for."""

    convert: Path
    quantize: Path | None


def find_llama_cpp(folder: Path | None, quantize: str | None) -> LlamaCpp:
    """Return the programs of llama.cpp in a folder, by default in that of ``$LLAMA_CPP``, else on the path.

    Raises:
        CapabilityError: there is no converter, or no program that quantizes, although ``quantize`` names a type.
        PresetError: the program doesn't list that type.
    """
    root = folder or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    places = [root] if root is not None else [Path(each) for each in os.get_exec_path()]
    convert = next((place / CONVERT for place in places if (place / CONVERT).is_file()), None)
    if convert is None:
        where = f"{root} has no {CONVERT}" if root is not None else f"{CONVERT} isn't on the path"
        raise CapabilityError(
            f"--format gguf runs your own llama.cpp, and {where}. Get it, and its converter's packages:\n"
            "  git clone --depth 1 https://github.com/ggml-org/llama.cpp\n"
            "  pip install gguf sentencepiece\n"
            "and add --llama-cpp llama.cpp. Or convert the folder of --format hf yourself:\n"
            f"  python llama.cpp/{CONVERT} FOLDER --outfile model.gguf"
        )
    inside = [convert.parent / each / QUANTIZE for each in (".", "build/bin", "bin")]
    program = next((each for each in inside if each.is_file()), None)
    if program is None and (found := shutil.which(QUANTIZE)) is not None:
        program = Path(found)
    if quantize is not None and program is None:
        raise CapabilityError(
            f"--quantize {quantize} runs {QUANTIZE}, and {convert.parent} has none; build it:\n  {_BUILD}"
        )
    if quantize is not None and (types := _types(program)) and quantize.upper() not in types:
        raise PresetError(f"--quantize {quantize}{nearest(quantize.upper(), types)}{program} takes {', '.join(types)}")
    return LlamaCpp(convert.resolve(), program)


def write_gguf(programs: LlamaCpp, model: Path, folder: Path, dtype: str | None, quantize: str | None) -> list[str]:
    """Convert a folder of transformers to a file of GGUF in another folder, quantize it, and move the Modelfile there.

    Returns:
        A line about the file.

    Raises:
        CapabilityError: llama.cpp fails; the message has its last lines.
    """
    file = folder / "model.gguf"
    _run([sys.executable, programs.convert, model, "--outfile", file, "--outtype", TYPES[dtype]])
    if quantize is not None:
        quantized = folder / f"model-{quantize.upper()}.gguf"
        _run([programs.quantize, file, quantized, quantize.upper()])
        file.unlink()
        file = quantized
    if (written := model / "Modelfile").is_file():
        text = written.read_text(encoding="utf-8").replace("FROM .", f"FROM ./{file.name}", 1)
        (folder / "Modelfile").write_text(text, encoding="utf-8")
    by = f"{programs.convert}, after logits were compared"
    return [f"{file.name}: by {by}{'' if quantize is None else f'; rounded by {programs.quantize}, unmeasured'}"]


def _types(program: Path | None) -> list[str]:
    """Return the names that ``llama-quantize`` lists in its usage, as in ``  15  or  Q4_K_M  :  4.58G``."""
    done = _called([program, "--help"])
    return re.findall(r"^ *(?:\d+ +or +)?([A-Z]\w+) +:", done.stdout + done.stderr, re.MULTILINE)


def _called(command: Sequence[object]) -> subprocess.CompletedProcess[str]:
    words = list(map(str, command))
    try:
        return subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:  # no program, or one for another machine
        raise CapabilityError(f"{words[0]} can't be run: {error.strerror}") from error


def _run(command: Sequence[object]) -> None:
    done = _called(command)
    if done.returncode:
        words = list(map(str, command))
        last = "\n  ".join((done.stderr + done.stdout).strip().splitlines()[-5:])
        hint = ""
        if "pre-tokenizer" in last:
            hint = (
                "\nllama.cpp doesn't know this tokenizer: update it, or export with the base's own, --tokenizer FOLDER"
            )
        if "ModuleNotFoundError" in last:
            hint = f"\ninstall llama.cpp's packages for {sys.executable}: pip install gguf sentencepiece"
        raise CapabilityError(f"{' '.join(words)} failed with status {done.returncode}:\n  {last}{hint}")
