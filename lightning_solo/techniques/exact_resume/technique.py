"""Checkpoints from which a run continues as if it had never stopped, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_solo.data.item_states import ItemStates
from lightning_solo.data.loaders import Resumable
from lightning_solo.data.prefetch import Prefetcher, prefetched
from lightning_solo.data.replayed_loaders import REPLAYED, Replayed, is_stateful, replayed
from lightning_solo.errors import CheckpointError
from lightning_solo.optim.window_gradients import gradients_of, set_gradients, warn_of_dropped_window
from lightning_solo.random_states import get_states, global_sources, put_states
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.exact_resume.card import CARD, Settings

KEYS = {"place", "hooks", "ahead", "random", "metrics", "logged", "loaders", "window"}


class ExactResume(Technique, Settings):
    """Saves all that a resumed run needs to equal the undisturbed one by ``torch.equal``, wherever it was saved.

    Beside what Lightning saves these are random states, the positions of loaders, logged values, the states of metrics,
    and the place in the loops. The run itself isn't changed.

    Raises:
        PresetError: an argument isn't a boolean.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._latest, self._ready = "before", 0
        self._hooks: Callable[[], list[str]] = list  # called at the end of an epoch or validation
        self._states: dict[str, Any] | None = None  # random states and metrics at the latest place that is repeated
        self._resumed: dict[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Follow the places of a fit."""
        if stage != "fit" or self.ctx is not None:
            return
        super().setup(trainer, pl_module, stage)
        assert self.ctx is not None
        self._init_state()
        undo = self.ctx.undo
        self._hooks = undo.enter_context(patches.places(trainer, self._at, self._begin))
        undo.enter_context(patches.after_train_start(trainer.strategy, self._restore))

    # --- loaders ---

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Return a loader that saves its position; one that does so already, too, saves random states.

        Raises:
            ConflictError: the loader returns batches in no fixed order.
        """
        if isinstance(loader, Prefetcher):  # it stands before this technique
            inner = self.loader(ctx, loader.loader)
            return prefetched(inner, loader.depth, loader.upload, loader.limit, loader.on_draws)
        if isinstance(loader, Resumable) and not isinstance(loader, Replayed):
            loader.items = ItemStates(loader)
        elif isinstance(loader, DataLoader) and (isinstance(loader, Replayed) or not is_stateful(loader)):
            used = patches.batches_used(ctx.trainer, loader)
            loader = replayed(loader, fast_forward=self.fast_forward, batches_used=used)
        patches.sampler_numbered(ctx.trainer, loader, ctx.home)
        return loader

    # --- places ---

    def _at(self, place: str) -> None:
        assert self.ctx is not None
        self._latest = place
        self._ready = patches.batches_fetched(self.ctx.trainer)
        self._states = self._now() if place in ("epoch_start", "batch", "validation") else None

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the random states: Lightning restores them after the check."""
        self._states = None if self.ctx is None else self._now()

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self._states = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note that what is saved by later callbacks, such as ModelCheckpoint, is saved after validation."""
        if self.ctx is not None and not trainer.sanity_checking:
            self._at("validated")

    def _now(self) -> dict[str, Any]:
        assert self.ctx is not None
        return {
            "random": get_states(global_sources(self.ctx.device)),
            "metrics": _metric_states(self.ctx.module) if self._latest == "validation" else None,
        }

    # --- saving ---

    def state_dict(self) -> dict[str, Any]:
        """Return random states, the place in the loops, logged values and metrics; nothing after the run."""
        if self.ctx is None:
            return {}
        if self._resumed is not None:  # not restored yet
            return {**self._resumed, "ahead": 0}
        trainer = self.ctx.trainer
        place = patches.place_of(trainer, self._latest, self._ready)
        repeated = self._states if place in ("before", "epoch_start", "batch", "batch_done") else None
        now = repeated or self._now()
        return {
            "place": place,
            "hooks": self._hooks(),
            "ahead": patches.fetched_ahead(trainer),
            "random": now["random"],
            "metrics": _metric_states(self.ctx.module) if now["metrics"] is None else now["metrics"],
            "logged": patches.logged_values(trainer),
            "window": self._open_window(place),
        }

    def _open_window(self, place: str) -> dict[str, Any] | None:
        """Return the gradients of the window of micro-batches that is open, and its weights; None if none is."""
        assert self.ctx is not None
        trainer, window = self.ctx.trainer, self.ctx.window
        automatic = self.ctx.module.automatic_optimization
        if place in (*patches.BETWEEN_EPOCHS, "epoch_end") or (automatic and window.is_last and place != "batch"):
            return None
        if not window.gradients_saved or (automatic and window.before(patches.batches_done(trainer)) == 0):
            return None
        return {
            "gradients": gradients_of(trainer.optimizers),
            "held": window.held,
            "latest": window.latest,
            "stay": window.gradients_stay,
        }

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the positions of loaders that another run would not understand apart from Lightning's."""
        states = patches.loader_states(checkpoint)
        own = checkpoint["callbacks"].get(self.state_key)
        if not states or not own:
            return
        ahead = own["ahead"]
        loaders: list[Any] = []
        others: list[Any] = []
        for state in states:
            mine = isinstance(state, Mapping) and REPLAYED in state
            if mine:
                records = state[REPLAYED]
                state = {REPLAYED: [records[max(0, len(records) - 1 - ahead)]]}
            elif isinstance(state, Mapping) and isinstance(state.get("items"), list):
                items = state["items"]
                state = {**state, "items": [items[max(0, len(items) - 1 - ahead)]], "back": ahead}
            loaders.append(state if mine else None)
            if not mine:
                others.append(state)
        own["loaders"] = loaders
        patches.set_loader_states(checkpoint, others)

    # --- resuming ---

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Give the positions of loaders back to Lightning."""
        own = checkpoint.get("callbacks", {}).get(self.state_key)
        if not own or "loaders" not in own:
            return
        others = iter(patches.loader_states(checkpoint) or [])
        patches.set_loader_states(checkpoint, [state or next(others) for state in own["loaders"]])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts.

        Raises:
            CheckpointError: a key is missing or unknown.
        """
        if state_dict and not {*state_dict} <= KEYS:
            raise CheckpointError(
                f"callback.exact_resume: the checkpoint's state has the unknown keys {sorted({*state_dict} - KEYS)};"
                " resume with the version that saved it, or write ~callback.exact_resume"
            )
        self._resumed = state_dict or None

    def _begin(self) -> tuple[str, list[str]] | None:
        """Return the place of the checkpoint, and its hooks, before the loaders are made; None if there is none."""
        assert self.ctx is not None
        resumed = self._resumed
        if resumed is None:
            return None
        put_states(global_sources(self.ctx.device), resumed["random"])
        return resumed["place"], resumed["hooks"]

    def _restore(self) -> None:
        """Restore random states, metrics and logged values, after all hooks of the start."""
        assert self.ctx is not None
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return
        _set_metric_states(self.ctx.module, resumed["metrics"])
        patches.values_logged(self.ctx.trainer, self.ctx.home, resumed["logged"], resumed["place"])
        if resumed["window"] is not None:
            self._reopen(self.ctx, resumed["window"])
        if resumed["place"] != "before":
            put_states(global_sources(self.ctx.device), resumed["random"])

    def _reopen(self, ctx: Run, saved: Mapping[str, Any]) -> None:
        """Restore the gradients of the open window."""
        if saved["stay"] != ctx.window.gradients_stay:
            warn_of_dropped_window()
            return
        set_gradients(ctx.trainer.optimizers, saved["gradients"])
        ctx.window.held, latest = saved["held"], saved["latest"]
        ctx.window.latest = None if latest is None else tuple(latest)


def _metric_states(module: nn.Module) -> dict[str, Any]:
    """Return the states of the metrics in a module, which its state dict usually leaves out."""
    return {
        path: {
            "updates": metric._update_count,
            "values": {name: _copied(getattr(metric, name)) for name in metric._defaults},
        }
        for path, metric in module.named_modules()
        if isinstance(getattr(metric, "_defaults", None), dict) and vars(metric).get("_update_count")
    }


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else [each.detach().clone() for each in value]


def _set_metric_states(module: nn.Module, states: Mapping[str, Any]) -> None:
    for path, state in states.items():
        metric: Any = module.get_submodule(path)
        for name, value in state["values"].items():
            setattr(metric, name, _copied(value) if isinstance(value, list) else value.to(metric.device))
        metric._update_count, metric._computed = state["updates"], None
