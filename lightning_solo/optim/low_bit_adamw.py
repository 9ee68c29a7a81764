"""AdamW with moments in 8 or 4 bits, by name; weights stay as they are."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_solo.optim.compact_adamw import CompactAdamW


class AdamW8bit(CompactAdamW):
    """`CompactAdamW` with fp32 masters and moments in 8 bits: 2.06 bytes of states per parameter of fp32 weights."""

    _moment_bits: ClassVar[int] = 8

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, master_bits=32, moment_bits=self._moment_bits)


class AdamW4bit(AdamW8bit):
    """`CompactAdamW` with fp32 masters and moments in 4 bits, by torchao's codes: 1.06 bytes per parameter."""

    _moment_bits: ClassVar[int] = 4
