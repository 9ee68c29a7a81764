"""Compiles the Triton kernels for GPUs that are not here, and counts what their machine code takes.

    python examples/measure_kernels.py [--only sm_90] [--write FILE] [--check examples/results/kernels.json]

Needs Triton, which brings NVIDIA's assembler and disassembler, and no GPU; `make kernels` has both. Each kernel is
compiled with the arguments that `triton_launches` passes it. Registers, spills and shared memory are the assembler's;
instructions are those of the machine code, which has no loop in a step, but for the subroutine for extreme quotients:
what a thread executes at most. ``--check`` fails where a kernel spills, or takes more than the file says.

How the time of a step is estimated, of which nothing has been measured. A multiprocessor (SM) of an H200 issues 4
instructions of 32 threads a clock; of these, per clock, 128 results are products and sums in fp32, 64 integers,
comparisons, selections and shuffled bytes, 16 roots, reciprocals and conversions, 32 loads, stores and shuffles (CUDA
C++ Programming Guide, throughput of native arithmetic instructions, 9.0; conversions at the least of what it has for
any). The slowest of these, or memory, whichever takes longer, is the step: that is so where enough programs are
resident that one computes while others wait for memory. Waiting for one another, and the ends of a launch, are not
counted. The clock is the highest an H200 has, 1.98 GHz: at 1.7 GHz computing takes 1.16 times as long. The floor is
what memory alone takes, at 4.1 TB/s: 85 % of H200's 4.8 TB/s.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from this_machine import versions
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_solo.optim import adamw_triton, triton_launches
from lightning_solo.optim.compressed_moments import BLOCK
from lightning_solo.optim.kernels import PER_PARTIAL, Control, Piece, Scalars, Sum

ARCHITECTURES = (80, 89, 90, 100, 120)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PARAMETERS = 8_030_261_248
"""Of a model of 8 billion parameters: Llama 3's."""
H200 = {"multiprocessors": 132, "clock_hz": 1.98e9, "bytes_per_s": 4.1e12}
PIPES = {"fp32": 128, "integer": 64, "special": 16, "memory": 32, "issue": 128}
"""Results per clock and multiprocessor."""
SPECIAL = ("MUFU", "I2F", "F2I", "F2F", "FRND", "I2I")
FP32 = ("FMUL", "FADD", "FFMA", "IMAD", "HFMA2")
MEMORY = ("LDG", "STG", "LDS", "STS", "SHFL", "LDC", "LDSM", "STSM", "ATOMS")
NO_PIPE = ("NOP", "BRA", "BSSY", "BSYNC", "BAR", "EXIT", "S2R", "S2UR", "CALL", "RET", "WARPSYNC", "DEPBAR")
MASTERS = {"24": torch.int8, "32": torch.int16, "stochastic": None, "fp32": None}
SLACK = 1.02
"""Of instructions and registers, before a kernel counts as worse: another Triton compiles a little otherwise."""


Launch = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name of a kernel, its arguments, its constants and options."""


class Noted:
    """Stands for the module of the kernels: ``module.name[grid](...)`` is noted instead of launched."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __getattr__(self, name: str) -> Any:
        module = self

        class Kernel:
            def __getitem__(self, grid: Any) -> Any:
                return lambda *args, **variant: module.launches.append((name, args, variant))

        return Kernel()


def piece_of(master: str, moment_bits: int, size: int, gradient: torch.dtype = torch.bfloat16) -> Piece:
    """Return a piece of zeros."""
    rows = -(-size // BLOCK)
    kinds = {"weight": torch.float32 if master == "fp32" else torch.bfloat16, "grad": gradient}
    correction = MASTERS[master]
    if correction is not None:
        kinds["correction"] = correction
    kinds["exp_avg"], kinds["exp_avg_sq"] = (
        (torch.int8, torch.uint8) if moment_bits == 8 else (torch.float32, torch.float32)
    )
    tensors = {name: torch.zeros(size, dtype=dtype) for name, dtype in kinds.items()}
    if moment_bits == 8:
        tensors |= {name: torch.zeros(rows) for name in ("exp_avg_scale", "exp_avg_sq_scale")}
    scalars = Scalars(1.0, 0.0, 0.1, 0.999, 0.001, 0.03, 1e-8, 1e-3, 1, 2)
    return Piece(tensors, scalars)


def bytes_per_element(piece: Piece) -> float:
    """Return what a step reads and writes: everything both ways, but for the gradient, which is read."""
    size = piece.tensors["weight"].numel()
    ways = {name: 1 if name == "grad" else 2 for name in piece.tensors}
    return sum(ways[name] * tensor.nbytes for name, tensor in piece.tensors.items()) / size


def launches() -> Iterator[tuple[str, Launch, float]]:
    """Yield kernels as (name, what is launched, bytes that an element takes); 0 where a program may do more or less."""
    control = Control(torch.tensor(1.0), torch.zeros(1, dtype=torch.int32))
    cpu = torch.device("cpu")
    whole, short = triton_launches.ROWS * BLOCK, triton_launches.ROWS * BLOCK + 1

    def noted(call: Any, *args: Any) -> Launch:
        module = Noted()
        real, triton_launches.functions = triton_launches.functions, lambda: module
        try:
            call(*args, control, cpu)
        finally:
            triton_launches.functions = real
        (launch,) = module.launches
        return launch

    for bits in (8, 32):
        for master in MASTERS:
            piece = piece_of(master, bits, whole)
            yield (
                f"step, {master}, moments {bits}",
                noted(triton_launches.launch_steps, [piece]),
                bytes_per_element(piece),
            )
    for kind in (torch.float16, torch.float32):
        piece = piece_of("24", 8, whole, kind)
        yield (
            f"step, 24, moments 8, {str(kind)[6:]} gradient",
            noted(triton_launches.launch_steps, [piece]),
            bytes_per_element(piece),
        )
    for name, size, count in (("short", short, 1), ("many", whole, 2), ("many, short", short, 2)):
        for master, bits in (("24", 8), ("fp32", 32)):
            pieces = [piece_of(master, bits, size) for _ in range(count)]
            yield f"step, {master}, moments {bits}, {name}", noted(triton_launches.launch_steps, pieces), 0.0
    for total in (torch.bfloat16, torch.float32, None):
        for count in (1, 2):
            sums = [
                Sum(
                    torch.zeros(PER_PARTIAL, dtype=torch.bfloat16),
                    None if total is None else torch.zeros(PER_PARTIAL, dtype=total),
                    False,
                    torch.zeros(1),
                )
                for _ in range(count)
            ]
            into = "norm" if total is None else f"sum in {str(total)[6:]}"
            yield f"{into}{', many' if count == 2 else ''}", noted(triton_launches.launch_sums, sums), 0.0


def compiled(launch: Launch, architecture: int) -> Any:
    """Return a kernel that is compiled as its launch would have it compiled."""
    name, args, variant = launch
    function = getattr(adamw_triton, name)
    options = {key: variant[key] for key in ("num_warps", "enable_fp_fusion")}
    given = dict(zip(function.arg_names, args, strict=False)) | {
        key: value for key, value in variant.items() if key not in options
    }
    types = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64"}
    types |= {torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32"}
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(function.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(at,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{types[value.dtype]}"
            attributes[(at,)] = [["tt.divisibility", 16]]
        else:
            assert isinstance(value, float) or parameter.do_not_specialize, parameter.name
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def counts(binary: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """Return (registers and spilled bytes, how often each instruction stands in the code before its subroutines)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary)
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True)
        code = subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True)
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    own = re.split(r"^\s*\$__internal_0_\$\S*:", code.stdout, flags=re.MULTILINE)[0]
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", own, re.MULTILINE)
    assert found, "no instructions in what nvdisasm prints"
    return {"registers": used["REG"], "spilled_bytes": used["STACK"] + used["LOCAL"]}, collections.Counter(found)


def pipes_of(instructions: dict[str, int]) -> dict[str, int]:
    """Return how many instructions go through each part of a multiprocessor; the uniform ones are only issued."""
    made = dict.fromkeys(PIPES, 0)
    for name, count in instructions.items():
        if name == "NOP":
            continue
        made["issue"] += count
        if name in SPECIAL:
            made["special"] += count
        elif name in FP32:
            made["fp32"] += count
        elif name in MEMORY:
            made["memory"] += count
        elif name not in NO_PIPE and not name.startswith("U"):
            made["integer"] += count
    return made


def figures(launch: Launch, size: float, architecture: int) -> dict[str, Any]:
    """Return what a kernel takes on an architecture."""
    kernel = compiled(launch, architecture)
    used, instructions = counts(kernel.asm["cubin"])
    pipes = pipes_of(instructions)
    made: dict[str, Any] = {**used, "shared_bytes": kernel.metadata.shared, "instructions": pipes["issue"]}
    if size:
        per_thread = triton_launches.ROWS * BLOCK / (32 * launch[2]["num_warps"])
        made["per_element"] = {name: round(count / per_thread, 2) for name, count in pipes.items()}
        if architecture == 90:
            made |= estimated(made["per_element"], size)
    return made


def estimated(per_element: dict[str, float], size: float) -> dict[str, Any]:
    """Return the time of a step of 8 billion parameters on an H200, as the module's first words say."""
    clocks = {name: count / PIPES[name] for name, count in per_element.items()}
    slowest = max(clocks, key=clocks.__getitem__)
    computing = PARAMETERS * clocks[slowest] / (H200["multiprocessors"] * H200["clock_hz"])
    floor = PARAMETERS * size / H200["bytes_per_s"]
    return {
        "bytes_per_element": round(size, 3),
        "h200_8b": {
            "slowest": slowest,
            "computing_ms": round(computing * 1e3, 1),
            "floor_ms": round(floor * 1e3, 1),
            "over_floor": round(max(computing, floor) / floor, 2),
        },
    }


def worse(now: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """Return in words what a kernel takes more of than is known."""
    return [
        f"{now[name]} {name}, {known[name]} before"
        for name in ("registers", "instructions")
        if now[name] > known[name] * SLACK
    ]


def row(name: str, architecture: int, found: dict[str, Any]) -> str:
    """Return a line of the table."""
    per_element = found.get("per_element", {})
    time = found.get("h200_8b", {})
    words = f"{time['computing_ms']:5.1f} / {time['floor_ms']:5.1f} ms {time['over_floor']:5.2f}x" if time else ""
    per = f"{per_element['issue']:7.1f}" if per_element else "       "
    return (
        f"{name:42} sm_{architecture:<4}{found['registers']:5}{found['spilled_bytes']:7}{found['shared_bytes']:8}"
        f"{found['instructions']:7}{per}  {words}"
    )


def main() -> int:
    """Compile, print the table, and compare or write."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", help="an architecture, such as sm_90")
    arguments.add_argument("--write", type=Path)
    arguments.add_argument("--check", type=Path)
    by = arguments.parse_args()
    known = json.loads(by.check.read_text())["kernels"] if by.check else {}
    made: dict[str, dict[str, Any]] = {}
    complaints = []
    print(f"{'kernel':42} {'':7}{'regs':>5}{'spills':>7}{'shared':>8}{'instr':>7}{'per el.':>7}  8b on an H200 / floor")
    for name, launch, size in launches():
        for architecture in ARCHITECTURES:
            target = f"sm_{architecture}"
            if by.only in (None, target):
                found = made.setdefault(name, {})[target] = figures(launch, size, architecture)
                print(row(name, architecture, found), flush=True)
                if found["spilled_bytes"]:
                    complaints.append(f"{name}, {target}: spills {found['spilled_bytes']} bytes")
                reference = known.get(name, {}).get(target)
                if by.check and reference is None:
                    complaints.append(f"{name}, {target}: not in {by.check}")
                elif by.check:
                    complaints += [f"{name}, {target}: {words}" for words in worse(found, reference)]
    if by.write:
        heading = {"command": "make kernels", "versions": {**versions(), "triton": triton.__version__}, "h200": H200}
        by.write.write_text(json.dumps({**heading, "parameters": PARAMETERS, "kernels": made}, indent=1) + "\n")
    print("\n".join(complaints) or "nothing spills, and nothing takes more than before")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
