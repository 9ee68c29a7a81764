"""The choices of `lightning-solo export`, `convert` and `soft-labels`, known without importing torch."""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """A format of `lightning-solo export`."""

    target: str  # "module:function"; the function takes the source, the output and options, writes, and returns lines
    options: tuple[str, ...]  # names of the options that it takes, besides ``output`` and ``overwrite``


_GRAPH = "lightning_solo.cli.export_graph:write_graph"
_FOLDER = "lightning_solo.export.pretrained:export_pretrained"
FORMATS = {
    "weights": Format("lightning_solo.export.weights:write_weights", ("dtype", "live")),
    "hf": Format(_FOLDER, ("dtype", "base", "base_folder", "tokenizer", "shard_size", "bits", "live")),
    "adapter": Format(_FOLDER, ("dtype", "base_folder", "tokenizer", "live")),
    "pruned": Format("lightning_solo.cli.pruned_run:write_pruned", ("dtype", "live", "allow")),
    "gguf": Format(_FOLDER, ("dtype", "base", "base_folder", "tokenizer", "llama_cpp", "quantize", "live")),
    "quantized": Format(
        "lightning_solo.cli.quantized_run:write_quantized",
        ("bits", "group_size", "activations", "calibration_batches", "layers", "live", "allow"),
    ),
    "factorized": Format("lightning_solo.cli.factorized_run:write_factorized", ("rank", "layers", "live", "allow")),
    "onnx": Format(_GRAPH, ("batch", "length", "allow")),
    "torch_export": Format(_GRAPH, ("batch", "length", "allow")),
}
"""Name of a format -> how it is written."""
DTYPES = ("fp32", "bf16", "fp16")
"""The types of exported weights."""
BASES = ("dequantized", "original")
"""The weights of a base in 4 or 8 bits to which an adapter can be added."""
FORMS = ("plain", "compact")
"""The forms of a checkpoint's optimizer states, as `lightning-solo convert --to` takes them."""
START = "start"
"""The teacher that is a copy of a module as its fit begins."""
TEACHER_DTYPES = ("auto", "float32", "bfloat16", "float16")
"""The types of a teacher's weights; auto leaves them as they are stored."""
