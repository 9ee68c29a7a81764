"""Measures the host memory and the seconds that a model of 254 million bf16 weights takes to load in 4 bits.

A fresh process per way reads the growth of anonymous resident memory (RssAnon, without mapped files) at its peak and at
the end. The shards are written before, and read from the file system's cache. Each row is the largest of three
processes: glibc keeps more or less of the memory that was freed.

    python examples/measure_quantized_loading.py --write examples/results/quantized_loading_cpu.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from this_machine import machine, versions

MODEL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
WAYS = ("bf16, mapped", "each layer at once, bitsandbytes", "load_quantized, first", "load_quantized, second")
REPEATS = 3


def anonymous_mib() -> float:
    """Return this process's anonymous resident memory."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


class Peak:
    """Reads the anonymous memory every 2 ms within a context."""

    def __enter__(self) -> Peak:
        self.before = self.most = anonymous_mib()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, anonymous_mib())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def save(folder: Path) -> int:
    """Write the model in four shards and return its number of weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**MODEL)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="130MB")
    return sum(p.numel() for p in model.parameters())


def naive(folder: Path) -> Any:
    """Quantize each linear layer of a mapped model at once, by bitsandbytes' own module."""
    import torch
    from transformers import AutoModelForCausalLM

    from lightning_solo.bitsandbytes_operators import bitsandbytes

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for name, part in list(model.named_modules()):
        if isinstance(part, torch.nn.Linear) and name != "lm_head":
            layer = bitsandbytes().nn.Linear4bit(
                part.in_features, part.out_features, part.bias is not None, quant_type="nf4", device="meta"
            )
            layer.weight = (
                bitsandbytes()
                .nn.Params4bit(
                    part.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True, module=layer
                )
                .to("cpu")
            )
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
    return model


def load(way: str, folder: Path) -> dict[str, Any]:
    """Load in this process; return the figures."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import lightning_solo as solo
    from lightning_solo.bitsandbytes_operators import bitsandbytes
    from lightning_solo.nn.quantized import QuantizedWeight

    torch.set_num_threads(1)
    bitsandbytes()
    solo.load_quantized  # noqa: B018  # imported before the clock starts
    torch.ones(8, 8) @ torch.ones(8, 8)
    config = LlamaConfig(**MODEL)
    AutoModelForCausalLM.from_config(LlamaConfig(**{**MODEL, "num_hidden_layers": 1, "vocab_size": 8}))
    start = time.perf_counter()
    with Peak() as peak:
        if way == WAYS[0]:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        elif way == WAYS[1]:
            model = naive(folder)
        else:
            build = lambda: AutoModelForCausalLM.from_config(config)  # noqa: E731
            model = solo.load_quantized(build, folder, cache=folder.parent / "cache")
        seconds, end = time.perf_counter() - start, anonymous_mib()
    weights = [part for part in model.modules() if isinstance(part, QuantizedWeight)]
    return {
        "way": way,
        "seconds": round(seconds, 1),
        "peak_mib": round(peak.most - peak.before),
        "kept_mib": round(end - peak.before),
        "quantized_mib": round(sum(weight.nbytes for weight in weights) / 2**20),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, default=None)
    parser.add_argument("--way", choices=WAYS, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        print(json.dumps(load(arguments.way, arguments.folder) if arguments.way else save(arguments.folder)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, "--folder", f"{scratch}/model"]
        outputs = []
        for way in ([], *(["--way", each] for each in WAYS)):
            runs = []
            for _ in range(REPEATS if way else 1):
                if way[1:] == ["load_quantized, first"]:
                    shutil.rmtree(f"{scratch}/cache", ignore_errors=True)
                done = subprocess.run([*command, *way], check=True, stdout=subprocess.PIPE, text=True)
                runs.append(json.loads(done.stdout.splitlines()[-1]))
            outputs.append({key: max(run[key] for run in runs) for key in runs[0]} if way else runs[0])
            print(outputs[-1], flush=True)
    if arguments.write is not None:
        result = {
            "machine": machine(),
            "versions": {**versions(), "bitsandbytes": importlib.metadata.version("bitsandbytes")},
            "command": f"python examples/measure_quantized_loading.py --write examples/results/{arguments.write.name}",
            "model": MODEL,
            "weights": outputs[0],
            "rows": outputs[1:],
        }
        arguments.write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
