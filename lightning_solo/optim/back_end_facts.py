"""Package, precisions and bytes of each library's AdamW, known without importing the library.

```
back end                 weight   correction   moments        scales       bytes per parameter
torchao_8bit             2        0            1 + 1          2 * 4/256    4.03125
torchao_4bit             2        0            0.5 + 0.5      2 * 4/128    3.0625
bitsandbytes_8bit        4        0            1 + 1          2 * 4/256    6.03125
bitsandbytes_paged_8bit  4        0            1 + 1          2 * 4/256    6.03125, of which 2.0 in unified memory
flashoptim               2        1            1 + 1          2 * 2/32     5.125
```
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_solo.units import parse_budget


@dataclass(frozen=True)
class BackEnd:
    """A library's AdamW."""

    package: str  # the library
    install: str  # the requirement for pip
    precisions: tuple[str, ...]  # Lightning's names of the precisions in which no update is lost, the best one first
    moment_bits: int  # bits of each moment
    block: int  # elements that share a scale
    scale_bytes: int = 4  # bytes of each scale
    smallest: int = 4096  # parameters with fewer elements keep their moments in fp32
    whole_blocks: bool = False  # whether parameters that aren't a multiple of the block keep their moments in fp32
    correction_bytes: int = 0  # bytes of a bf16 weight's correction, per element
    needs_cuda: bool = False  # whether it runs on CUDA devices alone
    paged_from: int | None = None  # parameters with at least as many elements have their moments in unified memory

    @property
    def bf16_weights(self) -> bool:
        """Whether bf16 weights lose no update."""
        return "bf16-true" in self.precisions

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer states per element of a large parameter.

        >>> BACK_ENDS["torchao_8bit"].state_bytes  # 1 + 1 + 2 * 4 / 256
        2.03125
        """
        return self.correction_bytes + self.moment_bits / 4 + 2 * self.scale_bytes / self.block

    def compresses(self, numel: int) -> bool:
        """Return whether the moments of a parameter with ``numel`` elements are compressed."""
        return numel >= self.smallest and not (self.whole_blocks and numel % self.block)

    def state_sizes(self, numel: int, *, is_bf16: bool) -> dict[str, int]:
        """Return the bytes of a parameter's states, without step counts and tables of codes."""
        lower = self.correction_bytes * numel if is_bf16 else 0
        sizes = {"correction": lower} if lower else {}
        if not self.compresses(numel):
            return {**sizes, "moments": 8 * numel}
        scales = 2 * self.scale_bytes * -(-numel // self.block)
        return {**sizes, "moments": 2 * (numel * self.moment_bits // 8), "scales": scales}


_TORCHAO_PRECISIONS = ("bf16-true", "bf16-mixed", "32-true")
_BITSANDBYTES_PRECISIONS = ("bf16-mixed", "32-true")  # it rounds bf16 weights to the nearest

BACK_ENDS = {
    "torchao_8bit": BackEnd("torchao", "lightning-solo[compact]", _TORCHAO_PRECISIONS, 8, 256, whole_blocks=True),
    "torchao_4bit": BackEnd("torchao", "lightning-solo[compact]", _TORCHAO_PRECISIONS, 4, 128, whole_blocks=True),
    "bitsandbytes_8bit": BackEnd("bitsandbytes", "lightning-solo[bitsandbytes]", _BITSANDBYTES_PRECISIONS, 8, 256),
    "bitsandbytes_paged_8bit": BackEnd(
        *("bitsandbytes", "lightning-solo[bitsandbytes]", _BITSANDBYTES_PRECISIONS, 8, 256),
        needs_cuda=True,
        paged_from=100_000,
    ),
    "flashoptim": BackEnd(
        *("flashoptim", "lightning-solo[flashoptim]", ("bf16-true",), 8, 32),
        scale_bytes=2,
        smallest=0,
        correction_bytes=1,
        needs_cuda=True,
    ),
}
"""Facts about each back end but ``own``, by its name."""
SETTINGS = "callback.compact_states"
"""The path of the settings of compact states, as messages name it."""
OPTION = f"{SETTINGS}.back_end"
"""The setting that chooses a back end."""


def parse_state_budget(budget: int | str | None) -> int | str | None:
    """Return the bytes of states that stay on the device, "auto" or None.

    Raises:
        ValueError: it is not a number of bytes, "auto" or None.
    """
    try:
        return budget if budget is None or budget == "auto" else parse_budget(budget, least=0)
    except ValueError as error:
        raise ValueError(f"{error}; 0 for none, auto for what fits, null for all") from None
