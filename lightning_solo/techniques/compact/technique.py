"""Model states of 5 bytes per parameter instead of 16: split master weights, 8-bit moments, gradients released.

Saves:      of AdamW's 16 bytes per parameter (weight 4, gradient 4, moments 8) all but 5.06: bf16 weight 2, correction
            1, moments 1 + 1, scales 0.0625; with ``master_bits="16-stochastic"`` and ``moment_bits=4`` all but 3.06
Costs:      unpacking and packing in the step. With accumulation the gradients' sum is kept, 4 bytes per parameter; with
            clipping by norm alone the gradients, 2; on the host with ``gradient_buffer="host"``. States on the host
            (``state_budget``) pass through the device, 3 bytes per parameter each way, in every step
Numerics:   ``master_bits=32, moment_bits=32``: fp32 AdamW with a bf16 forward, on a CPU bit for bit, accumulation
            and clipping included. 24 bits drop updates below 2**-17 of a weight; 8-bit moments move an update by some
            4 % (`examples/measure_moments.py`)
Conflicts:  optimizers that are not torch's, LBFGS, SparseAdam, Muon; fp16; release with manual optimization, and with
            hooks that read ``.grad`` after backward
Reference:  FlashOptim 2026, arXiv 2602.23349; Dettmers et al. 2021, arXiv 2110.02861; Lv et al. 2023, arXiv 2306.09782
"""

from __future__ import annotations

import importlib
from typing import Any

from lightning_solo.errors import PresetError
from lightning_solo.optim.gradient_release import BUFFERS
from lightning_solo.presets.registry import target_of
from lightning_solo.seams.strategy import SoloStrategy
from lightning_solo.seams.technique import Technique
from lightning_solo.units import format_bytes


class CompactStrategy(SoloStrategy):
    """Train on one device with compact model states, whatever AdamW or Adam ``configure_optimizers`` returns.

    Of torch's other optimizers that step each parameter by itself the weights are as compact, the states in fp32.

    ``CompactStrategy(...)`` is for the Trainer of ``lightning``; :func:`lightning_solo.seams.homes.for_home` gives
    that of ``pytorch_lightning``.

    Args:
        master_bits: Of the weights that are stepped: 32, 24, or "16-stochastic" for bf16 rounded stochastically.
        moment_bits: Of each of Adam's moments: 32, 8, or 4, which needs torchao.
        release_gradients: Use and free each gradient in backward.
        gradient_buffer: Where gradients are kept when accumulation or clipping by norm needs them: "device" or "host".
        state_budget: Bytes of optimizer states that stay on the device, or a text such as "8GiB"; the others are kept
            in pinned memory of the host. "auto": as many as the first step leaves room for; None: all.
        checkpoint_weights: What a checkpoint has: "bf16" weights, with the corrections among the optimizer's states,
            or "fp32" master weights.
        back_end: Whose optimizer steps: "own", or another library's, which has its own bits: "torchao_8bit",
            "torchao_4bit", "bitsandbytes_8bit", "bitsandbytes_paged_8bit", "flashoptim".

    Raises:
        PresetError: a value that is none of those allowed.
    """

    def __init__(
        self,
        master_bits: int | str = 24,
        moment_bits: int = 8,
        release_gradients: bool = True,
        gradient_buffer: str = "device",
        state_budget: int | str | None = None,
        checkpoint_weights: str = "bf16",
        back_end: str = "own",
    ) -> None:
        if gradient_buffer not in BUFFERS:
            raise PresetError(f"strategy.gradient_buffer={gradient_buffer!r}: write {', '.join(map(repr, BUFFERS))}")
        states = _part(
            "compact_states",
            {"label": "compact", "names": ("strategy=compact", "strategy")},
            master_bits=master_bits,
            moment_bits=moment_bits,
            state_budget=state_budget,
            checkpoint_weights=checkpoint_weights,
            back_end=back_end,
        )
        release = _part(
            "gradient_release",
            {
                "label": "compact",
                "option": "strategy.release_gradients",
                "remedy": "write strategy.release_gradients=false",
            },
            buffer=gradient_buffer,
        )
        super().__init__()
        self.master_bits = master_bits
        self.moment_bits = moment_bits
        self.release_gradients = release_gradients
        self.gradient_buffer = gradient_buffer
        self.state_budget = state_budget
        self.checkpoint_weights = checkpoint_weights
        self.back_end = back_end
        self.brought = [states, release] if release_gradients else [states]

    def __repr__(self) -> str:
        names = (
            *("master_bits", "moment_bits", "release_gradients", "gradient_buffer", "state_budget"),
            *("checkpoint_weights", "back_end"),
        )
        return f"CompactStrategy({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def setup(self, trainer: Any) -> None:
        """Set up the run; say what gradients take where they are not released, which says so itself."""
        super().setup(trainer)
        run = self.solo_run
        if run is not None and run.training and not self.release_gradients:
            kept = sum(p.nbytes for p in run.module.parameters() if p.requires_grad)
            run.info(f"compact: gradients, kept on the device until the step: {format_bytes(kept)}")


def _part(name: str, called: dict[str, Any], **arguments: Any) -> Technique:
    """Return the technique of that name, whose messages call it as this strategy's users do."""
    module, _, cls = target_of("callback", name, name).partition(":")
    made: Technique = object.__new__(getattr(importlib.import_module(module), cls))
    vars(made).update(called)  # before the constructor, whose messages have names, too
    made.__init__(**arguments)  # type: ignore[misc]
    return made
