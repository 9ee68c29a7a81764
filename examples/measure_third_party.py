"""Train modules of other people's libraries under every exact preset, against Lightning without a preset.

    python examples/measure_third_party.py [--only gluonts_deepar,...] [--presets checkpointing,...] [--write]

The modules are the files of `third_party/conf/experiment`; their data is generated. Each trains three steps under the
preset, and three under the preset's precision alone. ``--write`` renews `results/third_party_cpu.json`, or with
``--only`` and ``--presets`` these in it. `make third_party` installs the libraries, and compares their results with
that file.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytorch_lightning
import torch
from omegaconf import OmegaConf
from this_machine import machine, versions
from torch import Tensor

import lightning_solo as solo
from lightning_solo.build import make
from lightning_solo.presets.compose import compose
from lightning_solo.presets.files import preset_files

FOLDER = Path(__file__).with_name("third_party")
RESULTS = Path(__file__).with_name("results") / "third_party_cpu.json"
COMMAND = "make third_party"
STEPS = 3
LIBRARIES = {
    "neuralforecast": "neuralforecast",
    "pytorch_forecasting": "pytorch-forecasting",
    "gluonts": "gluonts",
    "replay": "replay-rec",
    "pytorch_tabular": "pytorch-tabular",
    "torch_geometric": "torch-geometric",
    "transformers": "transformers",
    "diffusers": "diffusers",
}
"""Package that is imported -> its name in the index; file names begin with the former."""


def library_of(name: str) -> str:
    """Return the package of a module's file."""
    return next(library for library in LIBRARIES if name.startswith(f"{library}_"))


def names() -> list[str]:
    """Return the names of the modules."""
    return sorted(path.stem for path in (FOLDER / "conf" / "experiment").glob("*.yaml"))


def exact_presets() -> list[str]:
    """Return the names of presets for one device that consist of exact techniques alone."""
    composed = {name: compose(name) for name in preset_files()}
    return [
        name
        for name, config in composed.items()
        if config.auto is None and config.strategy is None and all(part.card.exact for part in config.techniques)
    ]


def on_cpu(preset: str) -> list[str]:
    """Return the overrides with which a preset's techniques run on a CPU."""
    return [
        f"callback.{part.card.name}.{key}={value}"
        for part in compose(preset).techniques
        for key, value in (part.card.on_cpu or {}).items()
        if part.card.exact and key == "allow_cpu"
    ]


def parts_of(name: str) -> tuple[Any, Any]:
    """Return (module, data) of a file, the same at each call."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    node: Any = OmegaConf.to_container(OmegaConf.load(FOLDER / "conf" / "experiment" / f"{name}.yaml"), resolve=True)
    allow = [library_of(name), "generated_data"]
    lightning.pytorch.seed_everything(0, verbose=False)
    module = make("model", node["model"], allow=allow)
    return module, make("data", node["data"], allow=allow)


class Losses(lightning.pytorch.Callback):
    """The losses of a fit."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


def fit(name: str, precision: str | None, preset: str | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Train a module and return its losses and its weights and buffers."""
    module, data = parts_of(name)
    home = pytorch_lightning if isinstance(module, pytorch_lightning.LightningModule) else lightning.pytorch
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        quiet: dict[str, Any] = {
            "accelerator": "cpu",
            "max_steps": STEPS,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "default_root_dir": folder,
        }
        if preset is None:
            kwargs: dict[str, Any] = {"precision": precision, "callbacks": [losses], "devices": 1}
        else:
            options = {"module": module, "batch": data} if preset == "auto" else {}
            kwargs = solo.trainer_kwargs(preset, on_cpu(preset), callbacks=[losses], lightning=home.__name__, **options)
        lightning.pytorch.seed_everything(1, verbose=False)
        home.Trainer(**quiet, **kwargs).fit(module, data)
    weights = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    return losses.losses, {key: value.detach().cpu().clone() for key, value in weights.items()}


def words_of(error: BaseException) -> str:
    """Return an error's class and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between weights, relative to the largest element of each."""
    most = 0.0
    for key, value in one.items():
        if not torch.equal(value, other[key]):
            a, b = value.double(), other[key].double()
            most = max(most, float((a - b).abs().max() / a.abs().max().clamp(min=1e-12)))
    return most


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal to the bit; NaN equals NaN."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


class Row:
    """Trains one module under many presets; a fit without a preset runs once per precision."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.plain: dict[str, Any] = {}

    def without(self, precision: str) -> Any:
        """Return losses and weights of a fit without a preset, or its error."""
        if precision not in self.plain:
            try:
                self.plain[precision] = fit(self.name, precision)
            except Exception as error:
                self.plain[precision] = error
        return self.plain[precision]

    def under(self, preset: str) -> dict[str, Any]:
        """Return how a fit under a preset compares with one without."""
        precision = compose(preset).precision or "32-true"
        plain = self.without(precision)
        try:
            losses, weights = fit(self.name, precision, preset)
        except solo.errors.SoloError as error:
            return {"result": "refused", "why": words_of(error)}
        except Exception as error:
            if isinstance(plain, Exception) and type(plain) is type(error):
                return {"result": "fails without the preset too", "why": words_of(plain)}
            return {"result": "failed", "why": words_of(error)}
        if isinstance(plain, Exception):
            return {"result": "trains, and fails without the preset", "why": words_of(plain)}
        if plain[1].keys() != weights.keys():
            return {"result": "failed", "why": f"other keys: {sorted(plain[1].keys() ^ weights.keys())[:5]}"}
        equal = [repr(x) for x in losses] == [repr(x) for x in plain[0]] and all(
            same(value, weights[key]) for key, value in plain[1].items()
        )
        if equal:
            return {"result": "equal to the bit"}
        return {"result": "differs", "by": difference(plain[1], weights), "losses": [plain[0], losses]}


def quieten() -> None:
    """Silence what the libraries and Lightning say."""
    warnings.filterwarnings("ignore")
    for home in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(home).setLevel(logging.ERROR)


def measure(only: Sequence[str], presets: Sequence[str]) -> dict[str, Any]:
    """Return module -> preset -> result, and print each."""
    quieten()
    results: dict[str, Any] = {}
    for name in only:
        started = time.monotonic()
        row = Row(name)
        results[name] = {preset: row.under(preset) for preset in presets}
        counts: dict[str, list[str]] = {}
        for preset, result in results[name].items():
            words = f"{result['result']} {result.get('by', '')} {result.get('why', '')}".strip()
            counts.setdefault(words, []).append(preset)
        print(f"{name} ({time.monotonic() - started:.0f} s)", flush=True)
        for words, those in counts.items():
            print(f"    {', '.join(those)}: {words}", flush=True)
    return results


def main() -> None:
    """Print a line for each, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="some modules, joined by commas")
    parser.add_argument("--presets", help="other presets, joined by commas")
    parser.add_argument("--write", action="store_true")
    line = parser.parse_args()
    only = line.only.split(",") if line.only else names()
    presets = line.presets.split(",") if line.presets else exact_presets()
    results = measure(only, presets)
    if line.write:
        if line.only or line.presets:
            stored = json.loads(RESULTS.read_text())["modules"]
            results = {**stored, **{name: {**stored.get(name, {}), **row} for name, row in results.items()}}
        found = {library: version(LIBRARIES[library]) for library in sorted({library_of(name) for name in results})}
        about = {"machine": machine(), "versions": {**versions(), **found}, "steps": STEPS, "command": COMMAND}
        about["libraries"] = sorted(found)
        RESULTS.write_text(json.dumps({**about, "modules": results}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
