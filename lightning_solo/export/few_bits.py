"""Models of transformers with linear weights in 4 or 8 bits, as bitsandbytes has them in exported folders."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from lightning_solo.attributes import replaced
from lightning_solo.bitsandbytes_operators import bitsandbytes
from lightning_solo.errors import CapabilityError, NothingToDoError, PresetError, listed
from lightning_solo.export.trained_models import untied
from lightning_solo.machine import is_installed
from lightning_solo.nn.blocks import counted
from lightning_solo.nn.named_weights import kept_parameters
from lightning_solo.nn.quantized import BLOCK

BITS = (4, 8)
OUTPUTS = 32
"""On CPUs, bitsandbytes dequantizes weights in 4 bits to wrong numbers if `BLOCK` doesn't divide the inputs of a layer,
unless their number is no multiple of 32; and where the CPU has AVX512-BF16, its layers fail if this doesn't divide the
outputs."""


def check_bits(format: str, bits: int | None) -> None:
    """Refuse a number of bits that transformers doesn't load, and a machine that can't write them.

    Raises:
        PresetError: another number, or the format has no bits.
        CapabilityError: a package is missing.
    """
    if bits is None:
        return
    if bits not in BITS or format != "hf":
        also = "; for 2 to 8 bits of any module write --format quantized, for GGUF --quantize" if format == "hf" else ""
        raise PresetError(f"bits={bits!r} of format={format!r}: write {' or '.join(map(str, BITS))} with hf{also}")
    if missing := [name for name in ("bitsandbytes", "accelerate") if not is_installed(name)]:
        raise CapabilityError(
            f"bits={bits}: transformers rounds weights by bitsandbytes and accelerate; write pip install"
            f" {' '.join(missing)}"
        )


def rounded(model: Any, bits: int) -> tuple[Any, str]:
    """Return a copy of a model whose linear layers transformers has rounded, and a line about it.

    Output heads and shared weights stay, and layers of sizes that bitsandbytes computes wrongly on CPUs.

    Raises:
        NothingToDoError: no layer can be rounded.
    """
    import transformers

    rounding: Any = transformers.BitsAndBytesConfig
    four = bits == min(BITS)
    reasons, kept, count = kept_parameters(model), {}, 0
    for name, part in model.named_modules():
        if _is_linear(part):
            count += 1
            outputs, inputs = part.weight.shape if isinstance(part, nn.Linear) else part.weight.shape[::-1]
            if reason := reasons.get(id(part.weight)):
                kept[name] = reason
            elif four and (inputs % BLOCK or outputs % OUTPUTS):
                kept[name] = f"{inputs} inputs aren't a multiple of {BLOCK}, or {outputs} outputs of {OUTPUTS}"
    if len(kept) == count:
        raise NothingToDoError(
            f"bits={bits}: {type(model).__name__} has no linear layer that bitsandbytes can round:"
            f" {_reasons(kept) or 'none'}; leave --bits out"
        )
    bitsandbytes()  # before transformers imports it, so that nothing is fetched
    options: dict[str, Any] = {"load_in_8bit": True}
    if four:
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        options["bnb_4bit_compute_dtype"] = model.dtype
    result = type(model).from_pretrained(
        None,
        config=copy.deepcopy(model.config),
        state_dict=untied(model.state_dict()),
        dtype=model.dtype,
        quantization_config=rounding(llm_int8_skip_modules=list(kept), **options),
        device_map={"": "cpu"},
    )
    layers = [part for part in result.modules() if type(part).__module__.startswith("bitsandbytes.")]
    own = {name: "in fp32" for name, part in result.named_modules() if _is_linear(part) and name not in kept}
    experts = {name: f"{p.ndim} dimensions" for name, p in model.named_parameters() if p.ndim > 2}
    done = {id(layer.weight) for layer in layers}
    left = sum(p.nbytes for p in result.parameters() if id(p) not in done)
    share = left / sum(p.nbytes for p in result.parameters())
    left_out = _reasons({"embeddings": "", "norms": "", **kept, **own, **experts})
    return result, f"{bits} bits: {counted(layers)}; {share:.0%} of the bytes aren't rounded: {left_out}"


def _is_linear(part: nn.Module) -> bool:
    return type(part) is nn.Linear or type(part).__name__ == "Conv1D"


def _reasons(kept: Mapping[str, str]) -> str:
    return listed([f"{name} ({reason})" if reason else name for name, reason in kept.items()], 5)


@contextmanager
def exact_on_cpus(model: Any) -> Iterator[None]:
    """Keep layers in 4 bits from a kernel that computes in bf16, and 8-bit ones from a line for each about fp16."""
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    with ExitStack() as stack:
        for part in model.modules():
            if hasattr(part, "support_avx512bf16_for_cpu"):
                stack.enter_context(replaced(part, "support_avx512bf16_for_cpu", False))
        with replaced(logger, "disabled", True):
            yield
