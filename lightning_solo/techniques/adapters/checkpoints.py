"""Adapters in a checkpoint: their weights alone, and what identifies the weights that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_solo.attributes import replaced
from lightning_solo.errors import CheckpointError, listed
from lightning_solo.nn.adaptation import AdapterConfig, adapter_names
from lightning_solo.nn.adapter_targets import OPTION
from lightning_solo.nn.adapter_weights import (
    RECORD,
    load_adapter_weights,
    refuse_other_base,
    round_base,
    trained_keys,
    unrounded,
)
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Checkpoint

if TYPE_CHECKING:
    from lightning_solo.techniques.adapters.technique import Adapters


class AdapterCheckpoint(Checkpoint):
    """How adapters are saved and loaded."""

    def __init__(self, ctx: Run, technique: Adapters) -> None:
        self._ctx = ctx
        self._technique = technique

    def saved_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the adapter's weights, those of modules that are trained whole, and buffers that have changed."""
        technique = self._technique
        if not self._saves_adapters():
            return weights
        return technique.merged if technique.merged is not None else self.own_weights(weights)

    def _saves_adapters(self) -> bool:
        """Return whether there is an adapter to save; not after the user has merged it or taken it out."""
        technique = self._technique
        if technique.config is None:
            return False
        return technique.merged is not None or technique.config.name in adapter_names(self._ctx.module)

    def own_weights(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is trained, of a state dict of the module with adapters."""
        technique, module = self._technique, self._ctx.module
        assert technique.config is not None
        kept = set(trained_keys(module, technique.config, weights))
        changed = technique.buffers.changed() if technique.buffers is not None else []
        parts = {name.rpartition(".")[0] for name in [*changed, *technique.loaded]}
        kept |= {name for name, _ in module.named_buffers() if name.rpartition(".")[0] in parts}
        return {key: value for key, value in weights.items() if key in kept}

    def saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint with the adapter's configuration and what identifies its base."""
        config = self._technique.config
        if config is None or not self._saves_adapters():
            return checkpoint
        return {**checkpoint, RECORD: {"config": asdict(config), "base": self._technique.base}}

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        """Put the adapters in, and load them alone.

        Raises:
            CheckpointError: the checkpoint has no adapters, or those of other settings, or of another base.
        """
        record = patches.loaded_checkpoint(self._ctx.trainer).get(RECORD)
        if record is None:
            if self._ctx.training:
                raise CheckpointError(
                    "the checkpoint has no adapters, so a run with adapters can't continue it; to train adapters on"
                    " its weights, load them before the fit: module.load_state_dict(torch.load(path)['state_dict'])"
                )
            yield  # whole weights, for an evaluation
            return
        technique = self._technique
        technique.enter(self._ctx)
        assert technique.config is not None
        if changed := AdapterConfig(**record["config"]).changed(technique.config):
            raise CheckpointError(
                f"the checkpoint's adapter has {listed(changed)}; write these settings of {OPTION}, as in the run that"
                " saved it"
            )
        refuse_other_base(technique.base, record["base"])
        module = self._ctx.module
        if not self._ctx.training and (line := round_base(module, record["base"])):
            self._ctx.info(line)
        load = partial(self._load, type(module).load_state_dict.__get__(module))
        with replaced(module, "load_state_dict", load):
            yield

    def _load(self, stock: Any, weights: Mapping[str, Any], strict: bool = True, **options: Any) -> Any:
        technique = self._technique
        assert technique.config is not None
        buffers = load_adapter_weights(self._ctx.module, technique.config, weights, partial(stock, **options))
        technique.loaded = buffers
        return [], []  # nothing is missing, and nothing unknown

    def load_states(self, proceed: Any, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states of the same frozen weights.

        Raises:
            CheckpointError: the adapter was trained on weights in 4 or 8 bits, and these are plain.
        """
        if formats := unrounded(self._ctx.module, checkpoint.get(RECORD, {}).get("base")):
            name, form = next(iter(formats.items()))
            raise CheckpointError(
                f"the checkpoint's adapter was trained on weights in 4 or 8 bits, as {name} in {form}, and the module's"
                f" are plain; add callback.quantized_base with format={form}, or start a new run after"
                " solo.load_adapters(module, path), which rounds them"
            )
        proceed(checkpoint)
