"""The strategy of compact model states: split master weights, 8-bit moments and gradient release together."""

from __future__ import annotations

from typing import Any

from lightning_solo.cards.catalogue import load_class, own_cards
from lightning_solo.seams.run import Run
from lightning_solo.seams.strategy import SoloStrategy
from lightning_solo.techniques.compact.card import CARD
from lightning_solo.units import format_bytes


class CompactStrategy(SoloStrategy):
    """Train on one device with compact model states, whatever AdamW or Adam ``configure_optimizers`` returns.

    Of torch's other optimizers that step each parameter by itself the weights are as compact, the states in fp32.

    ``CompactStrategy(...)`` is for the Trainer of ``lightning``; :func:`lightning_solo.seams.homes.for_home` gives
    that of ``pytorch_lightning``.

    Args:
        master_bits: Of the weights that are stepped: 32, 24, or "16-stochastic" for bf16 rounded stochastically.
        moment_bits: Of each of Adam's moments: 32, 8, or 4, which needs torchao.
        release_gradients: Use and free each gradient in backward; by manual optimization they are kept all the same.
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

    release_gradients: bool
    gradient_buffer: str

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
        self._checked = CARD.check_call(locals(), "strategy")
        super().__init__()
        vars(self).update(vars(self._checked))
        self.brought = self._parts = self._new_parts()

    def _new_parts(self) -> list[Any]:
        """Return the techniques of which this strategy is made: compact states, and the release of gradients."""
        arguments = {name: value for name, value in vars(self._checked).items() if "gradient" not in name}
        states = _part("compact_states", **arguments)
        states.settings = self._checked  # whose messages name the strategy
        release = _part("gradient_release", buffer=self.gradient_buffer)
        release.option, release.remedy = "strategy.release_gradients", "write strategy.release_gradients=false"
        states.label = release.label = "compact"
        return [states, release] if self.release_gradients else [states]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that is copied and pickled, without the techniques, which may be in a run."""
        state = super().__getstate__()
        del state["brought"], state["_parts"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned."""
        super().__setstate__(state)
        self.brought = self._parts = self._new_parts()

    def begin(self, trainer: Any) -> Run:
        """Return a new run, which by manual optimization keeps gradients: two backward passes may precede a step."""
        by_hand = not trainer.lightning_module.automatic_optimization
        self.brought = self._parts[:1] if by_hand else self._parts
        return super().begin(trainer)

    def __repr__(self) -> str:
        return CARD.repr(self)

    def setup(self, trainer: Any) -> None:
        """Set up the run; say what gradients take where they are not released, which says so itself."""
        super().setup(trainer)
        run = self.solo_run
        if run is not None and run.training and len(self.brought) == 1:
            kept = sum(p.nbytes for p in run.module.parameters() if p.requires_grad)
            why = " (manual optimization: none is released before it)" if self.release_gradients else ""
            run.info(f"compact: gradients, kept on the device until the step{why}: {format_bytes(kept)}")


def _part(name: str, **arguments: Any) -> Any:
    """Return a technique by its name."""
    return load_class(own_cards()[name])(**arguments)
