"""Part d of `make gpu`: a model of 1 billion parameters under most presets, each in a process of its own.

Then Llamas of the shapes of `plan_fine_tuning.py`, whose vocabulary is large: one of 1 billion parameters under
presets for language models, and one of 8 billion within 24 GiB.
"""

from __future__ import annotations

import sys

from result import SMALL, Result
from runs import trained

PRESETS = (
    "compact", "bf16", "checkpointing", "compact_checkpointing", "compact_host", "baseline", "bf16_true",
    "checkpointing_selective", "compile", "gradient_release", "split_weights", "host_states", "offloading",
    "compact_states", "micro_batching", "stream", "stream_checkpointing", "compact_host_checkpointing", "accumulation",
    "fp16", "prefetch", "chunked_cross_entropy",
)  # fmt: skip
DEEPSPEED = ("zero_offload",) if SMALL else ("zero_offload", "zero_offload_parameters")
SIZE = (
    ["--model", "tiny", "--context", "16", "--batch", "2"]
    if SMALL
    else ["--model", "1b", "--context", "2048", "--batch", "4"]
)
CHUNKS = ["+callback=chunked_cross_entropy", "callback.chunked_cross_entropy.chunk_tokens=2048"]
LLAMA = ["--model", "llama-1B", "--context", "4096", "--batch", "2"]
LARGE = ["--model", "llama-8B", "--context", "4096", "--batch", "2", "--budget", "24GiB", "--steps", "5", "--plan"]
FUSED = "+callback=[chunked_cross_entropy,fused_kernels]"
LLAMAS = {
    "Llama 1B, compact": ["compact", *LLAMA, "--plan"],
    "Llama 1B, compact, fused_kernels": ["compact", "+callback=fused_kernels", *LLAMA, "--plan"],
    "Llama 1B, compact, chunked_cross_entropy": ["compact", *CHUNKS, *LLAMA, "--plan"],
    "Llama 1B, compact, fused_kernels and chunks": ["compact", FUSED, CHUNKS[1], *LLAMA, "--plan"],
    "Llama 1B, compact, low_precision_matmul": ["compact", "+callback=low_precision_matmul", *LLAMA, "--plan"],
    "Llama 1B, compact, tiled_mlp": ["compact", "+callback=tiled_mlp", *LLAMA, "--plan"],
    "Llama 1B, compact, regional_compilation": ["compact", "+callback=regional_compilation", *LLAMA, "--plan"],
    "Llama 1B, long_context": ["long_context", "--fp32", *LLAMA, "--plan"],
    "Llama 1B, adapters": ["adapters", *LLAMA, "--plan"],
    "Llama 8B, qlora": ["qlora", *CHUNKS, *LARGE],
    "Llama 8B, qlora_streamed": ["qlora_streamed", *CHUNKS, *LARGE],
    "Llama 8B, stream_checkpointing": ["stream_checkpointing", *CHUNKS, *LARGE],
    "Llama 8B, stream_checkpointing, fused_kernels": ["stream_checkpointing", FUSED, CHUNKS[1], *LARGE],
}


def main() -> int:
    """Train under the presets, those that matter most first."""
    result = Result("presets")
    trained(result, {preset: [preset, *SIZE, "--plan"] for preset in (PRESETS[:5] if SMALL else PRESETS)})
    if not SMALL:
        trained(result, LLAMAS)
    trained(result, {preset: [preset, *SIZE] for preset in DEEPSPEED if result.has("deepspeed", preset)})
    return result.end()


if __name__ == "__main__":
    sys.exit(main())
