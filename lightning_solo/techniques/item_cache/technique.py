"""A cache of the training data set's items, for epochs after the first."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset

from lightning_solo.data.item_cache import CachedItems, ItemStore, changing_item
from lightning_solo.errors import CapabilityError, ConflictError
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.item_cache.card import CARD, Settings
from lightning_solo.units import format_bytes, parse_budget


class ItemCache(Technique, Settings):
    """Loads each item of a map-style training data set once, and then reads it from memory or a file.

    Workers share the cache. It is freed at the end of the fit. Items beyond the budget are loaded as before.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._caches: list[CachedItems] = []
        self._reported = False

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Return a copy of the loader with a cached data set."""
        if reason := _no_items(loader):
            raise ConflictError(f"callback.item_cache and {reason}, or write ~callback.item_cache")
        dataset = loader.dataset
        while isinstance(dataset, CachedItems):  # from an earlier fit, in a user's CombinedLoader
            dataset = dataset.dataset
        cached = next((cache for cache in self._caches if cache.dataset is dataset), None)
        if cached is None:
            with isolate_rng():
                changing = changing_item(dataset)
            if changing:
                raise ConflictError(
                    f"callback.item_cache and {type(dataset).__name__}, {changing}: cached items would be frozen; move"
                    " random augmentation to collate_fn or on_after_batch_transfer and cache the items below it, or"
                    " write ~callback.item_cache"
                )
            try:
                folder = (self.folder or "") if self.place == "disk" else None
                store = ItemStore(len(dataset), parse_budget(self.budget), folder)
            except OSError as error:
                raise CapabilityError(
                    f"callback.item_cache.place={self.place}: the store can't be created ({error}); write"
                    " callback.item_cache.folder=<a folder on a disk with room> with place=disk, or"
                    " ~callback.item_cache (it needs Linux)"
                ) from error
            ctx.undo.callback(store.close)
            cached = CachedItems(dataset, store)
            self._caches.append(cached)
        changed = copy.copy(loader)
        vars(changed).update(dataset=cached, _iterator=None)  # DataLoader.__setattr__ refuses another data set
        return changed

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log what is cached after the first epoch."""
        if self._reported or self.ctx is None:
            return
        self._reported = True
        for cache in self._caches:
            store = cache.store
            items, count, unstored = store.items, store.count, store.unstored
            share = items / count if count else 0.0
            self.ctx.info(
                f"item_cache: {items:,} of {count:,} items ({share:.1%}) are cached, {format_bytes(store.bytes_used)}"
                f" of {format_bytes(store.budget)}"
            )
            if unstored:
                warnings.warn(f"callback.item_cache: items that can't be cached: {unstored}", stacklevel=2)
            if store.is_full:
                needed = format_bytes(round(store.bytes_used / max(items, 1) * count))
                self.ctx.info(
                    f"item_cache: the budget is full; all items take about {needed} (callback.item_cache.budget)"
                )

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._init_state()


def _no_items(loader: Any) -> str | None:
    """Return why a loader's items can't be cached and the remedy, or None."""
    if not isinstance(loader, DataLoader):
        return f"a loader of type {type(loader).__name__}: return a torch.utils.data.DataLoader from train_dataloader"
    dataset: Any = loader.dataset
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return f"the data set {name}, whose items have no index: give a map-style one, with __getitem__ and __len__"
    if hasattr(dataset, "set_epoch"):
        return f"{name}, whose items may change by set_epoch: give a data set of constant items"
    return None
