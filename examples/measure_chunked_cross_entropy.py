"""Measures the chunked cross-entropy against the plain one: peak of loss and head, time, and gradients.

Peaks are bytes counted by the ledger, from the head's forward to the end of its backward, the gradients of hidden
states and weight included: of a vocabulary of 128k and 16k tokens on tensors without data, which this needs no memory
for. Time and gradients are those of a smaller case on this machine, in which a chunk is the same share of the tokens.

    python examples/measure_chunked_cross_entropy.py   # to examples/results/chunked_cross_entropy_cpu.json, two minutes
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from this_machine import machine, versions
from torch import Tensor
from torch.nn import functional as F

from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn import chunked_cross_entropy
from lightning_solo.planner.fake_modules import fake_mode, known_numbers, with_numbers

VOCABULARY, TOKENS, CHUNK = 131_072, 16_384, 1_024
SMALL_VOCABULARY, SMALL_TOKENS, SMALL_WIDTH = 8_192, 1_024, 512
TINY = 8  # a bf16 product is slow on a CPU without instructions for it: its case is so many times smaller each way
TARGETS = {"peak": 0.10, "time": 1.1, "gradients": 1e-6}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the loss by way of all logits, in fp32 as Hugging Face's models compute it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def exactly(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the plain loss in the type of its arguments."""
    return F.cross_entropy(F.linear(hidden, weight), labels)


def in_chunks(tokens: int) -> Loss:
    """Return the chunked loss."""
    return lambda hidden, weight, labels: chunked_cross_entropy(hidden, weight, labels, chunk_tokens=tokens)


def peak(loss: Loss, width: int, dtype: torch.dtype, autocast: bool) -> int:
    """Return the bytes of the peak, of a case that is not computed."""
    with ExitStack() as stack:
        stack.enter_context(known_numbers())
        mode = fake_mode()
        labels = with_numbers(mode, torch.zeros(TOKENS, dtype=torch.int64))
        stack.enter_context(mode)
        hidden, weight = (torch.empty(n, width, dtype=dtype, requires_grad=True) for n in (TOKENS, VOCABULARY))
        ledger = stack.enter_context(Ledger())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss(hidden, weight, labels)
        value.backward()  # type: ignore[no-untyped-call]
        return ledger.peak_bytes


def small_case(smaller: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weight and labels that are likely under them, of which every tenth is ignored."""
    torch.manual_seed(0)
    words, tokens, width = (size // smaller for size in (SMALL_VOCABULARY, SMALL_TOKENS, SMALL_WIDTH))
    weight = torch.randn(words, width) * 0.02
    labels = torch.randint(0, words, (tokens,))
    hidden = torch.randn(tokens, width) + 10 * weight[labels]
    labels[::10] = -100
    return hidden, weight, labels


def gradients(loss: Loss, case: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Return the gradients of hidden states and weight, in fp64."""
    hidden, weight = (tensor.clone().requires_grad_() for tensor in case[:2])
    loss(hidden, weight, case[2]).backward()  # type: ignore[no-untyped-call]
    return [leaf.grad.double() for leaf in (hidden, weight) if leaf.grad is not None]


def distance(ones: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest relative difference of two tensors."""
    return max(float((one - other).norm() / other.norm()) for one, other in zip(ones, others, strict=True))


def seconds(loss: Loss) -> float:
    """Return the seconds of a forward and backward."""
    hidden, weight, labels = small_case()
    hidden.requires_grad_()
    weight.requires_grad_()
    start = time.perf_counter()
    loss(hidden, weight, labels).backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - start


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "chunked_cross_entropy_cpu.json"
    )
    arguments = parser.parse_args()
    kinds = {"fp32": (torch.float32, False), "bf16-mixed": (torch.float32, True), "bf16-true": (torch.bfloat16, False)}
    peaks = [
        {
            "width": width,
            "precision": name,
            "plain": peak(plain, width, *kind),
            "chunked": peak(in_chunks(CHUNK), width, *kind),
        }
        for width in (2048, 4096)
        for name, kind in kinds.items()
    ]
    small, tiny = (in_chunks(SMALL_TOKENS // smaller * CHUNK // TOKENS) for smaller in (1, TINY))
    case, (hidden, weight, labels) = small_case(), small_case(TINY)
    low = hidden.bfloat16(), weight.bfloat16(), labels
    exact = gradients(exactly, (low[0].double(), low[1].double(), labels))
    off = {
        "fp32": distance(gradients(small, case), gradients(plain, case)),
        "bf16": distance(gradients(tiny, low), exact),
        "bf16, plain": distance(gradients(plain, low), exact),
    }
    pairs = [(seconds(plain), seconds(small)) for _ in range(arguments.runs + 1)][1:]
    made: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "command": f"python examples/measure_chunked_cross_entropy.py --runs {arguments.runs}",
        "case": {"vocabulary": VOCABULARY, "tokens": TOKENS, "chunk_tokens": CHUNK},
        "small": {"vocabulary": SMALL_VOCABULARY, "tokens": SMALL_TOKENS, "width": SMALL_WIDTH},
        "targets": TARGETS,
        "peaks": peaks,
        "gradients": off,
        "seconds": {"plain": statistics.median(p for p, _ in pairs), "chunked": statistics.median(c for _, c in pairs)},
    }
    arguments.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
