"""Report which kernel of ``scaled_dot_product_attention`` runs, and why the others can't."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_solo.attributes import replaced
from lightning_solo.errors import CapabilityError

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Torch's kernels; ``math`` multiplies matrices, and saves the scores of all pairs of tokens."""

_OPERATORS = {
    "aten._scaled_dot_product_flash_attention": "flash",
    "aten._scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten._scaled_dot_product_cudnn_attention": "cudnn",
    "aten._scaled_dot_product_efficient_attention": "efficient",
    "aten._safe_softmax": "math",  # it has no operator of its own; no other kernel runs this one
}


def enabled_kernel(name: str) -> AbstractContextManager[Any]:
    """Return a context in which every thread can use only one kernel of `KERNELS`."""
    return sdpa_kernel(KERNELS[name])


class AttentionCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the attention kernels that run as torch operators, also in recomputed blocks.

    Attributes:
        kernels: name in `KERNELS` -> calls.
        refusals: kernel -> torch's reason against it, if ``math`` ran.
        by_hand: names of the modules that computed a softmax themselves.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[str] = Counter()
        self.refusals: dict[str, str] = {}
        self.by_hand: dict[str, None] = {}
        self._names = {part: name for name, part in module.named_modules()}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(operator.overloadpacket)
        if name in _OPERATORS:
            self.kernels[_OPERATORS[name]] += 1
        elif name == "aten._softmax":
            self.by_hand.update(dict.fromkeys(self._running()))
        return operator(*args, **(kwargs or {}))

    def _running(self) -> list[str]:
        """Return the name of the innermost module whose method is running, if there is one."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in self._names:
                if hasattr(owner, "_defaults"):  # a metric
                    return []
                return [f"{self._names[owner]} ({type(owner).__name__})"]
            frame = frame.f_back
        return []


@contextmanager
def attention_calls(module: nn.Module) -> Iterator[AttentionCalls]:
    """Count the attention kernels that a module runs in this context; compiled functions run uncompiled.

    Raises:
        CapabilityError: no enabled kernel can compute a call; the message gives torch's reasons, and the kernels
            that can.
    """
    calls = AttentionCalls(module)
    original = F.scaled_dot_product_attention

    def called(*args: Any, **kwargs: Any) -> Tensor:
        before = calls.kernels["math"]
        try:
            output = original(*args, **kwargs)
        except RuntimeError as error:
            if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                raise
            raise CapabilityError(_refusal_text(unusable_kernels(*args, **kwargs), args[0].device.type)) from error
        if calls.kernels["math"] > before:
            calls.refusals |= unusable_kernels(*args, **kwargs)
        return output

    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # it never compiles a function that first runs under a dispatch mode
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(replaced(F, "scaled_dot_product_attention", called))
        yield stack.enter_context(calls)


def unusable_kernels(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> dict[str, str]:
    """Return kernel -> torch's reason, for each that can't compute this call of ``scaled_dot_product_attention``.

    The arguments are those of the call; autocast converts them as in the call.

    >>> x = torch.randn(1, 1, 4, 8)
    >>> sorted(unusable_kernels(x, x, x))
    ['cudnn', 'efficient']
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    reasons = {}
    for name, backend in KERNELS.items():
        with sdpa_kernel(backend), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                torch._fused_sdp_choice(query, key, value, attn_mask, *args, **kwargs)
            except RuntimeError:
                texts = [str(warning.message).split(" (Triggered internally")[0].strip() for warning in caught]
                why = [text for text in texts if not text.endswith("because:") and "runtime disabled" not in text]
                reasons[name] = " ".join(dict.fromkeys(why)) or f"not on {device}, or torch gives no reason"
    return reasons


@contextmanager
def sdpa_in_transformers(module: nn.Module) -> Iterator[list[str]]:
    """Switch a module's Hugging Face models from ``"eager"`` attention to torch's, and yield their names.

    Models that can't use it stay eager: those with soft caps, or with attention weights as an output.
    """
    library = sys.modules.get("transformers.modeling_utils")
    models = (
        {} if library is None else {p: n for n, p in module.named_modules() if isinstance(p, library.PreTrainedModel)}
    )
    changed: dict[int, Any] = {}
    names = []
    for model, name in models.items():
        if (
            model.config._attn_implementation == "eager"
            and model._supports_sdpa
            and model._can_set_attn_implementation()
            and not model.config.output_attentions
        ):
            if id(model.config) not in changed:  # else it is a part of a model that is named already
                names.append(name)
            changed[id(model.config)] = model.config
    try:
        for config in changed.values():
            config._attn_implementation_internal = "sdpa"  # the public name would also set the parts' configurations
        yield names
    finally:
        for config in changed.values():
            config._attn_implementation_internal = "eager"


def _refusal_text(unusable: dict[str, str], device: str) -> str:
    why = "; ".join(f"{name}: {reason}" for name, reason in unusable.items())
    usable = [name for name in KERNELS if name not in unusable]
    return (
        f"attention: no enabled kernel can compute this call on {device} ({why}); these can: {', '.join(usable)}; write"
        f" {' or '.join(f'callback.attention.kernel={name}' for name in (*usable, 'auto'))}"
    )
