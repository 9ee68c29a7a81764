"""Part b of `make gpu`: the compact step in one kernel against torch's operators, its fused AdamW, the bandwidth."""

from __future__ import annotations

import copy
import sys
import time
from typing import Any

import torch
from result import SMALL, Result, milliseconds

from lightning_solo.optim.adamw_states import bytes_of, state_layout
from lightning_solo.optim.compact_adamw import CompactAdamW

KINDS: dict[str, dict[str, Any]] = {
    "24 bits, moments 8": {"master_bits": 24, "moment_bits": 8},
    "32 bits, moments 8": {"master_bits": 32, "moment_bits": 8, "split": True},
    "16-stochastic, moments 8": {"master_bits": "16-stochastic", "moment_bits": 8},
    "fp32 weights, moments 8": {"master_bits": 32, "moment_bits": 8},
    "24 bits, moments 32": {"master_bits": 24, "moment_bits": 32},
    "32 bits, moments 32": {"master_bits": 32, "moment_bits": 32, "split": True},
    "16-stochastic, moments 4": {"master_bits": "16-stochastic", "moment_bits": 4},
}
EQUAL = (1, 127, 4095, 4096, 4097, 2**16 + 1) if SMALL else (1, 127, 4096, 4097, 2**20 + 1, 2**24 + 129)
TIMED = (2**12,) if SMALL else (2**24, 2**28)
BANDWIDTH = 2**22 if SMALL else 2**30


def main() -> int:
    """Compare, then time."""
    result = Result("fused_step")
    for kind, arguments in KINDS.items():
        with result.attempt(f"equal, {kind}"):
            if arguments["moment_bits"] != 4 or result.has("torchao", f"equal, {kind}"):
                result.add(f"equal, {kind}", **difference(dict(arguments)))
    bandwidth = device_bandwidth()
    result.add("copy on the device", gb_per_s=bandwidth / 1e9)
    for elements in TIMED:
        with result.attempt(f"torch's fused AdamW, {elements}"):
            p = torch.nn.Parameter(torch.randn(elements, device="cuda"))
            p.grad = torch.randn_like(p)
            taken = milliseconds(torch.optim.AdamW([p], fused=True).step)
            # weight, gradient and two moments read, all but the gradient written, in fp32
            result.add("torch's fused AdamW", elements=elements, ms=taken, floor_ms=28 * elements / bandwidth * 1e3)
            del p
        for kind, arguments in KINDS.items():
            with result.attempt(f"{kind}, {elements}"):
                if arguments["moment_bits"] != 4 or result.has("torchao", kind):
                    result.add(kind, elements=elements, **timed(dict(arguments), elements, bandwidth))
        torch.cuda.empty_cache()
    with result.attempt("many small parameters"):
        result.add("many small parameters", **small_parameters())
    return result.end()


def optimizer_of(arguments: dict[str, Any], weights: torch.Tensor, fused: bool | None) -> CompactAdamW:
    """Return an optimizer of one parameter with these weights."""
    arguments = dict(arguments)
    p = torch.nn.Parameter(weights.clone())
    corrections = None
    if arguments.pop("split", False):
        from lightning_solo.optim.split_weights import split_parameters

        corrections = split_parameters([p], arguments["master_bits"])
    return CompactAdamW([p], lr=1e-2, fused=fused, corrections=corrections, **arguments)


def difference(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return how many numbers differ between fused steps and torch's operators, for how many parameters, and how far.

    ``off_0`` is the largest difference of weights, ``off_1`` and so on those of the states in the order of their names.
    """
    off: dict[str, float] = {}
    unlike = 0
    for elements in EQUAL:
        torch.manual_seed(elements)
        weights = torch.randn(elements, device="cuda")
        both = [optimizer_of(arguments, weights, fused) for fused in (None, False)]
        for _ in range(3):
            gradient = torch.randn(elements, device="cuda").to(both[0].param_groups[0]["params"][0].dtype)
            for optimizer in both:
                optimizer.step_one(optimizer.param_groups[0]["params"][0], gradient)
        ours, theirs = ([o.param_groups[0]["params"][0], *states(o)] for o in both)
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            apart = (one.detach().float() - other.detach().float()).abs()
            unlike += int((apart > 0).sum())
            name = f"off_{number}"
            off[name] = max(off.get(name, 0.0), float(apart.max()) if apart.numel() else 0.0)
    return {"numbers_unlike": unlike, "of": sum(EQUAL), **{name: value for name, value in off.items() if value}}


def states(optimizer: CompactAdamW) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's states, but for the count of steps."""
    (state,) = optimizer.state.values()
    return [value for name, value in sorted(state.items()) if name != "step"]


def timed(arguments: dict[str, Any], elements: int, bandwidth: float) -> dict[str, float]:
    """Return the time of a step beside what its bytes take, and what launching it takes of the CPU."""
    weights = torch.randn(elements, device="cuda")
    optimizer = optimizer_of(arguments, weights, None)
    del weights
    (p,) = optimizer.param_groups[0]["params"]
    gradient = torch.randn_like(p)
    taken = milliseconds(lambda: optimizer.step_one(p, gradient))
    layout = state_layout(p, arguments["master_bits"], arguments["moment_bits"])
    size = 2 * (p.nbytes + bytes_of(layout)) + gradient.nbytes
    begun = time.perf_counter()
    for _ in range(20):
        optimizer.step_one(p, gradient)
    launching = (time.perf_counter() - begun) / 20
    torch.cuda.synchronize()
    floor = size / bandwidth * 1e3
    return {"ms": taken, "floor_ms": floor, "of_floor": taken / floor, "launching_us": launching * 1e6}


def small_parameters() -> dict[str, float]:
    """Return what stepping 98 vectors takes, as GPT-2 has them, beside torch's fused AdamW."""
    made = [torch.nn.Parameter(torch.randn(768, device="cuda", dtype=torch.bfloat16)) for _ in range(98)]
    for p in made:
        p.grad = torch.randn_like(p)
    ours = CompactAdamW(copy.deepcopy(made))
    for p, q in zip(ours.param_groups[0]["params"], made, strict=True):
        p.grad = q.grad
    return {
        "ms": milliseconds(ours.step),
        "torch_fused_ms": milliseconds(torch.optim.AdamW(made, fused=True).step),
    }


def device_bandwidth() -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    source = torch.zeros(BANDWIDTH, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * BANDWIDTH / milliseconds(lambda: target.copy_(source)) * 1e3


if __name__ == "__main__":
    sys.exit(main())
