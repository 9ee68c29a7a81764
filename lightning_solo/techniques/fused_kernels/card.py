"""The card of `fused_kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_solo.cards.card import Card, Requirement
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import ROUNDING, answers
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing

AUTO = "auto"
KERNELS = ("rms_norm", "layer_norm", "swiglu", "geglu")


def _complaint(kernels: str | Sequence[str]) -> str | None:
    names = [kernels] if isinstance(kernels, str) else kernels
    if kernels == AUTO or (names and all(name in KERNELS for name in names)):
        return None
    return f"write 'auto', or names of {', '.join(KERNELS)}"


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of FusedKernels."""

    kernels: str | Sequence[str] = setting(
        AUTO, f"auto: all that the model can use; or names of {', '.join(KERNELS)}", check=_complaint
    )
    allow_cpu: bool = setting(
        False,
        "on a CPU, run torch's operators instead, which save the same tensors for backward; for tests and for trying",
    )


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan it with operators that save for backward the same tensors as the kernels."""
    assumption = (
        "fused_kernels: planned with torch's operators, which save the same tensors for backward; the kernels"
        " take less time, and no memory for results between operators"
    )
    attached = replace(settings, allow_cpu=True)
    return tracing.assuming(assumption, attached=attached)


def _fused_by_a_compiler(settings: Settings, configuration: Configuration) -> str | None:
    for chosen in configuration.techniques:
        if chosen.card.phase is Phase.COMPILE:
            return (
                f"callback.fused_kernels does nothing in blocks that {chosen.choice} compiles: the compiler fuses these"
                f" operators itself, also with others; write ~callback.fused_kernels, or {chosen.removal}"
            )
    return None


CARD = Card(
    name="fused_kernels",
    target="lightning_solo.techniques.fused_kernels.technique:FusedKernels",
    phase=Phase.REWRITE,
    settings=Settings,
    saves="tensors that Hugging Face's RMSNorm keeps between its operators, in bf16 4 of 6 bytes per number, and the"
    " activated tensor of a gated feed-forward part; and time: one pass over memory instead of one per operator",
    costs="compilation of each kernel in the first step, some seconds",
    numerics="sums in another order and fewer roundings: differences are within the precision's rounding; each kind of"
    " layer is compared with its kernel before the fit, outputs and gradients",
    conflicts="compiled blocks, where the compiler fuses operators itself; a second backward of one graph",
    reference="Hsu et al. 2024 (Liger Kernel), arXiv 2410.10989",
    reads=frozenset({"weights"}),
    rules=(_fused_by_a_compiler,),
    requires=(
        Requirement(
            "package",
            "callback.fused_kernels runs Liger's kernels; install it, to try it on a CPU write"
            " callback.fused_kernels.allow_cpu=true, or ~callback.fused_kernels",
            "liger-kernel>=0.8,<0.9",  # functions below its public ones are called (nn/liger.py)
            when=lambda settings: not settings.allow_cpu,
        ),
        Requirement(
            "cuda",
            "callback.fused_kernels runs Triton kernels; remove it, or to try it on a CPU write"
            " callback.fused_kernels.allow_cpu=true",
            when=lambda settings: not settings.allow_cpu,
        ),
    ),
    on_cpu={"allow_cpu": True},
    planned="lightning_solo.techniques.fused_kernels.card:planned",
    engines=answers(
        ddp=ROUNDING,
        fsdp=ROUNDING,
        zero3="it needs whole weights, which the engine gathers only while forward and backward run",
    ),
)
