"""Convert the user's AdamW to a `CompactAdamW`, and other torch optimizers to `MasterWeights`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import ConflictError
from lightning_solo.optim.adamw_state_dict import UNSUPPORTED
from lightning_solo.optim.back_end_facts import SETTINGS
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.master_weights import MasterWeights
from lightning_solo.optim.replacement import replace_optimizer
from lightning_solo.optim.torch_optimizers import ONE_BY_ONE, SERVED


def compacted(
    optimizer: Optimizer,
    schedulers: Iterable[Any] = (),
    *,
    master_bits: int | str,
    moment_bits: int,
    corrections: Mapping[Tensor, Tensor] | None = None,
    state_budget: int | str | None = None,
) -> CompactAdamW | MasterWeights:
    """Return a compact optimizer that shares the groups of a user's; schedulers then act on it.

    Args:
        optimizer: torch's AdamW or Adam, converted to a `CompactAdamW`; another torch optimizer that steps each
            parameter by itself, converted to a `MasterWeights`; or one of these two, which is returned as it is.
            A `MasterWeights` takes the corrections if its ``master_bits`` are the same.
        schedulers: of the optimizer.
        master_bits: as `CompactAdamW`.
        moment_bits: as `CompactAdamW`; other optimizers keep states in fp32.
        corrections: of split parameters.
        state_budget: as `CompactAdamW`.

    Raises:
        ConflictError: the optimizer, or an option of AdamW, has no compact form.
    """
    if isinstance(optimizer, (CompactAdamW, MasterWeights)):
        if state_budget is not None and getattr(optimizer, "state_budget", None) is None:
            raise ConflictError(
                f"{SETTINGS}.state_budget={state_budget!r} and a {type(optimizer).__name__} from configure_optimizers:"
                f" write CompactAdamW(..., state_budget={state_budget!r}) there, or {SETTINGS}.state_budget=null"
            )
        if optimizer.master_bits == master_bits:
            for p, lower in (corrections or {}).items():
                optimizer.set_correction(p, lower)
        return optimizer
    kind = type(optimizer)
    if kind not in SERVED:
        raise ConflictError(
            f"{SETTINGS} takes torch's {', '.join(ONE_BY_ONE)}, not {kind.__module__}.{kind.__name__}; return one of"
            " those from configure_optimizers, or lightning_solo.optim.CompactAdamW itself; to only release gradients,"
            f" write ~{SETTINGS} precision=32-true"
        )
    if kind not in (torch.optim.AdamW, torch.optim.Adam):
        if state_budget is not None:
            raise ConflictError(
                f"{SETTINGS}.state_budget={state_budget!r} and {kind.__name__}: only states of AdamW and Adam are"
                f" stored on the host; write {SETTINGS}.state_budget=null, or return torch.optim.AdamW"
            )
        other = MasterWeights(optimizer, master_bits=master_bits, corrections=corrections)
        replace_optimizer(optimizer, other, schedulers)
        return other
    for group in optimizer.param_groups:
        for name in UNSUPPORTED:
            if group.get(name):
                raise ConflictError(
                    f"{SETTINGS} and {kind.__name__}({name}=True), which has no compact form: write {name}=False"
                )
    compact = CompactAdamW(
        optimizer.param_groups,
        lr=optimizer.defaults["lr"],
        betas=optimizer.defaults["betas"],
        eps=optimizer.defaults["eps"],
        weight_decay=optimizer.defaults["weight_decay"],
        decoupled_weight_decay=kind is torch.optim.AdamW,
        master_bits=master_bits,
        moment_bits=moment_bits,
        corrections=corrections,
        state_budget=state_budget,
    )
    if optimizer.state:
        compact.load_state_dict(optimizer.state_dict())
        optimizer.state.clear()
    replace_optimizer(optimizer, compact, schedulers)
    return compact
