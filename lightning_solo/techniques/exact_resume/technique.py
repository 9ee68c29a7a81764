"""Checkpoints from which a run continues as if it had never stopped, to the bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from lightning_solo.data.item_states import ItemStates
from lightning_solo.data.loaders import Resumable
from lightning_solo.data.prefetch import Prefetcher, prefetched
from lightning_solo.data.replayed_loaders import REPLAYED, Replayed, ReplayedIterable, is_stateful, replayed
from lightning_solo.errors import CheckpointError
from lightning_solo.memory.sharded_tensors import local
from lightning_solo.nn.rollback import Rollback
from lightning_solo.optim.window_gradients import gradients_of, set_gradients, warn_of_dropped_window
from lightning_solo.random_states import SEARCHES, Source, get_states, global_sources, put_states, sources_in
from lightning_solo.seams import resuming
from lightning_solo.seams.engines import of_each_process
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Checkpoint, Technique
from lightning_solo.techniques.exact_resume.card import CARD, Settings

KEYS = {"buffers", "place", "hooks", "ahead", "random", "metrics", "logged", "loaders", "window", "spoilt", "fetching"}


class ExactResume(Technique, Settings):
    """Saves all that a resumed run needs to equal the undisturbed one by ``torch.equal``, wherever it was saved.

    Beside what Lightning saves these are random states, the positions of loaders, logged values, the states of metrics,
    and the place in the loops. The run itself isn't changed.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._latest, self._ready = "before", 0
        self._hooks: Callable[[], list[str]] = list  # called at the end of an epoch or validation
        self._states: dict[str, Any] | None = None  # those at the latest place, if a resumed run repeats what follows
        self._fetches: deque[dict[str, Any]] = deque(maxlen=2)  # random states before the latest batches were fetched
        self._rollback: Rollback | None = None  # of buffers and metrics, to the start of the batch
        self._stepped = self._has_backward = False  # in this batch
        self._resumed: dict[str, Any] | None = None
        self._kept: dict[str, Any] = {}
        self._own: dict[str, Source] = {}  # random generators in attributes
        self._searches = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Follow the places of a fit."""
        if stage != "fit" or self.ctx is not None:
            return
        super().setup(trainer, pl_module, stage)
        assert self.ctx is not None
        self._init_state()
        undo = self.ctx.undo
        self._hooks = undo.enter_context(resuming.places(trainer, self._at, self._begin))
        undo.enter_context(resuming.after_train_start(trainer.strategy, self._restore))
        undo.callback(self._keep, self.ctx)  # first

    # --- loaders ---

    def loader(self, ctx: Run, loader: Any) -> Any:
        """Return a loader that saves its position; one that does so already, too, saves random states."""
        if isinstance(loader, Prefetcher):  # it stands before this technique
            inner = self.loader(ctx, loader.loader)
            return prefetched(inner, loader.depth, loader.upload, loader.limit, loader.on_draws)
        if isinstance(loader, Resumable) and not isinstance(loader, Replayed):
            loader.items = ItemStates(loader)
        elif isinstance(loader, DataLoader) and (isinstance(loader, Replayed) or not is_stateful(loader)):
            used = resuming.batches_used(ctx.trainer, loader)
            loader = replayed(loader, fast_forward=self.fast_forward, batches_used=used)
        elif isinstance(loader, ReplayedIterable) or not is_stateful(loader):
            inner = loader.loader if isinstance(loader, ReplayedIterable) else loader
            loader = ReplayedIterable(inner, self.fast_forward, resuming.batches_used(ctx.trainer, inner))
        resuming.sampler_numbered(ctx.trainer, loader, ctx.home)
        self._put_before_fetch()
        return loader

    # --- places ---

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the steps of optimizers."""
        assert self.ctx is not None
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "register_step_post_hook"):
                self.ctx.undo.callback(optimizer.register_step_post_hook(self._note_step).remove)

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def backward(self, ctx: Run, proceed: Callable[..., Any], loss: Tensor) -> Any:
        """Note when gradients begin to change: after the hooks before backward."""
        if loss.requires_grad:
            loss.register_hook(self._note_backward)  # type: ignore[no-untyped-call]
        return proceed(loss)

    def _note_backward(self, _: Tensor) -> None:
        self._has_backward = True

    def _at(self, place: str) -> None:
        assert self.ctx is not None
        trainer = self.ctx.trainer
        if place == "first_fetch":
            self._fetches.append(get_states(self._sources(self.ctx)))
            return
        self._latest = place
        self._ready = resuming.batches_fetched(trainer)
        self._states = None
        if place == "batch":
            self._stepped = self._has_backward = False
            self._rollback = self._rollback or Rollback(self.ctx.module, self.ctx.device)
            self._rollback.save(random=False)
            self._fetches.append(get_states(self._sources(self.ctx)))
            self._states = {"random": self._fetches[-1], "logged": resuming.logged_values(trainer)}
        elif place == "epoch_start":
            self._states = {"random": get_states(self._sources(self.ctx))}
        elif place == "validation":
            self._states = {"random": get_states(self._sources(self.ctx)), "metrics": _metric_states(self.ctx.module)}

    def _sources(self, ctx: Run) -> dict[str, Source]:
        """Return the random generators: the global ones, and those in attributes of module and callbacks."""
        if self._latest != "batch" or self._searches < SEARCHES:  # some are made in a training step
            self._searches += 1
            owners = {each.state_key: each for each in ctx.trainer.callbacks}
            self._own = sources_in({**dict(ctx.module.named_modules(prefix="module")), **owners})
        return {**global_sources(ctx.device), **self._own}

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the random states: Lightning restores them after the check."""
        self._states = None if self.ctx is None else {"random": get_states(self._sources(self.ctx))}

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self._states = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note that what is saved by later callbacks, such as ModelCheckpoint, is saved after validation."""
        if self.ctx is not None and not trainer.sanity_checking:
            self._at("validated")

    # --- saving ---

    def state_dict(self) -> dict[str, Any]:
        """Return random states, the place in the loops, logged values and metrics; after a run those of its end."""
        return self._kept if self.ctx is None else self._state(self.ctx)

    def _keep(self, ctx: Run) -> None:
        """Keep the state of the run's end, for a checkpoint that is saved later."""
        if self._latest == "before":
            return
        state = self._state(ctx)
        if state["window"] is not None:
            state |= {"window": None, "spoilt": "after a fit that failed within an accumulation window"}
        self._kept = state

    def _state(self, ctx: Run) -> dict[str, Any]:
        if self._resumed is not None:  # not restored yet
            return {**self._resumed, "ahead": 0}
        trainer = ctx.trainer
        place = resuming.place_of(trainer, self._latest, self._ready)
        ahead = resuming.fetched_ahead(trainer)
        state = {
            "random": get_states(self._sources(ctx)),
            "metrics": _metric_states(ctx.module),
            "buffers": {name: buffer.clone() for name, buffer in self._unsaved_buffers(ctx)},
            "place": place,
            "hooks": self._hooks(),
            "ahead": ahead,
            "fetching": self._fetching(ctx, place, ahead),
            "logged": resuming.logged_values(trainer),
            "window": self._open_window(ctx, place),
            "spoilt": self._spoilt(ctx, place),
        }
        repeated = place in ("before", "epoch_start", "batch", "batch_done") and self._states
        return {**state, **(repeated or {})}

    def _fetching(self, ctx: Run, place: str, ahead: int) -> dict[str, Any] | None:
        """Return the random states from before the batch was fetched that a resumed run fetches as it starts."""
        if not ahead or not self._fetches or not resuming.fetches_ahead(ctx.trainer):
            return None
        return self._fetches[0 if place == "batch" else -1]

    def _unsaved_buffers(self, ctx: Run) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that change, but that a checkpoint leaves out (``persistent=False``).

        With several processes it leaves out all but those of the first one.
        """
        several = ctx.trainer.world_size > 1
        changing = {} if self._rollback is None else self._rollback.saved()
        for path, part in ctx.module.named_modules():
            for name in part._buffers if several else part._non_persistent_buffers_set:
                full, buffer = f"{path}.{name}".lstrip("."), part._buffers[name]
                if full in changing and buffer is not None:
                    yield full, buffer

    def _spoilt(self, ctx: Run, place: str) -> str | None:
        """Return why no run can continue here; None if one can."""
        if resuming.has_callback(ctx.trainer, "StochasticWeightAveraging"):
            return "under StochasticWeightAveraging, whose schedule Lightning doesn't restore exactly"
        if self._latest == "validation" and resuming.has_callback(ctx.trainer, "WeightAveraging"):
            return "in a validation, while averages took the place of the weights"
        if place != "batch" or not (self._stepped or self._has_backward):
            return None
        if self._stepped or not ctx.window.gradients_stay:
            return "within a step, after its optimizer has changed weights or gradients"
        if not ctx.module.automatic_optimization or ctx.window.before(resuming.batches_done(ctx.trainer)):
            return "within a micro-batch, after its backward has changed the gradients of those before it"
        return None

    def _open_window(self, ctx: Run, place: str) -> dict[str, Any] | None:
        """Return the gradients of the window of micro-batches that is open, and its weights; None if none is."""
        trainer, window = ctx.trainer, ctx.window
        automatic = ctx.module.automatic_optimization
        if automatic:  # else gradients may stay beyond the epoch's end
            at_an_end = place in (*resuming.BETWEEN_EPOCHS, "epoch_end") or (window.is_last and place != "batch")
            if at_an_end or window.before(resuming.batches_done(trainer)) == 0:
                return None
        return {
            # those of a varying window are saved by the technique that varies it
            "gradients": gradients_of(trainer.optimizers) if window.gradients_saved and not window.varies else [],
            "kept": window.gradients_saved,
            "held": window.held,
            "latest": window.latest,
            "stay": window.gradients_stay,
        }

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the positions of loaders that another run would not understand apart from Lightning's."""
        own = checkpoint["callbacks"].get(self.state_key)
        if not own:
            return
        if own["place"] == "batch" and self._rollback is not None and self._resumed is None:
            self._go_back(pl_module, checkpoint["state_dict"], own)
        several = trainer.world_size > 1
        if states := resuming.loader_states(checkpoint):
            self._keep_loaders(checkpoint, states, own, of_others=several)
        if several:
            ranks = of_each_process(trainer, tree_map_only(Tensor, _on_host, own))
            if ranks is None:
                own["spoilt"] = "after a failure in one process, without the states of the others"
                ranks = [own] * trainer.world_size
            checkpoint["callbacks"][self.state_key] = {"ranks": ranks}

    def _keep_loaders(self, checkpoint: Any, states: list[Any], own: dict[str, Any], *, of_others: bool) -> None:
        """Move positions of loaders to this technique's state; ``of_others``: copy those that Lightning keeps."""
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
            loaders.append(state if mine or of_others else None)
            if not mine:
                others.append(state)
        own["loaders"] = loaders
        resuming.set_loader_states(checkpoint, others)

    def _go_back(self, module: Any, weights: dict[str, Any], own: dict[str, Any]) -> None:
        """Save buffers and metrics as they were before this batch."""
        assert self._rollback is not None
        before = self._rollback.saved()
        weights |= {
            name: before[name].clone() for name, _ in module.named_buffers() if name in before and name in weights
        }
        own["metrics"] = _metric_states(module, before)
        own["buffers"] = {name: before[name].clone() for name in own["buffers"]}

    # --- resuming ---

    def checkpoint(self, ctx: Run) -> Checkpoint:
        """Return a change to the loading of float64 weights."""
        return _Loading(ctx)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take the state of this process, and give the positions of loaders back to Lightning."""
        callbacks = checkpoint.get("callbacks", {})
        own = callbacks.get(self.state_key)
        if own:
            ranks = own.get("ranks", [own])
            if len(ranks) != trainer.world_size:
                raise CheckpointError(
                    f"callback.exact_resume: the checkpoint was saved by {len(ranks)} processes, each with random"
                    f" numbers and data of its own, and this run has {trainer.world_size}; write devices={len(ranks)},"
                    " or ~callback.exact_resume"
                )
            own = callbacks[self.state_key] = ranks[trainer.global_rank]
        if not own or "loaders" not in own:
            return
        others = iter(resuming.loader_states(checkpoint) or [])
        resuming.set_loader_states(checkpoint, [next(others) if state is None else state for state in own["loaders"]])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts."""
        if state_dict and (differ := (KEYS ^ {*state_dict}) - {"loaders"}):
            raise CheckpointError(
                f"callback.exact_resume: the checkpoint's state has other keys than this version's: {sorted(differ)};"
                " resume with the version that saved it, or write ~callback.exact_resume"
            )
        if state_dict and state_dict["spoilt"]:
            raise CheckpointError(
                f"callback.exact_resume: the checkpoint was saved {state_dict['spoilt']}, and no run can continue it to"
                " the bit; resume from an earlier checkpoint, or write ~callback.exact_resume"
            )
        self._resumed = state_dict or None

    def _begin(self) -> tuple[str, list[str]] | None:
        """Return the place of the checkpoint, and its hooks, before the loaders are made; None if there is none."""
        assert self.ctx is not None
        resumed = self._resumed
        if resumed is None:
            return None
        self._put_before_fetch()
        return resumed["place"], resumed["hooks"]

    def _put_before_fetch(self) -> None:
        """Set the random states for a batch that Lightning fetches with the loader, if its length is unknown."""
        if self.ctx is None:
            return
        sources = self._sources(self.ctx)
        if self._resumed is not None:
            put_states(sources, self._resumed["fetching"] or self._resumed["random"])
        self._fetches.append(get_states(sources))

    def _restore(self) -> None:
        """Restore random states, metrics and logged values, after all hooks of the start."""
        assert self.ctx is not None
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return
        _set_metric_states(self.ctx.module, resumed["metrics"])
        _set_buffers(self.ctx.module, resumed["buffers"])
        if resumed["place"] not in resuming.BETWEEN_EPOCHS:
            resuming.accumulation_scheduled(self.ctx.trainer)
        resuming.values_logged(self.ctx.trainer, self.ctx.home, resumed["logged"], resumed["place"])
        if resumed["window"] is not None:
            self._reopen(self.ctx, resumed["window"])
        if resumed["place"] != "before":
            sources = self._sources(self.ctx)
            if lost := [name for name in resumed["random"] if "." in name and name not in sources]:
                raise CheckpointError(
                    f"callback.exact_resume: the checkpoint has the state of {lost[0]}, a random generator that isn't"
                    " here when training starts; make it in __init__, or write ~callback.exact_resume"
                )
            put_states(sources, resumed["random"])

    def _reopen(self, ctx: Run, saved: Mapping[str, Any]) -> None:
        """Restore the gradients of the open window."""
        if not saved["kept"]:
            raise CheckpointError(
                "callback.exact_resume: the checkpoint was saved within an accumulation window, whose gradients the"
                f" engine of {type(ctx.strategy).__name__} doesn't save; resume from a checkpoint that was saved after"
                " an optimizer step (ModelCheckpoint(every_n_train_steps=...)), or write ~callback.exact_resume"
            )
        if saved["stay"] != ctx.window.gradients_stay:
            warn_of_dropped_window()
            return
        if saved["gradients"]:
            set_gradients(ctx.trainer.optimizers, saved["gradients"])
        ctx.window.held, latest = saved["held"], saved["latest"]
        ctx.window.latest = None if latest is None else tuple(latest)


def _on_host(value: Tensor) -> Tensor:
    return local(value).detach().cpu()


class _Loading(Checkpoint):
    """Converts the module to float64 before weights of that kind are loaded; Lightning does so afterwards."""

    def __init__(self, ctx: Run) -> None:
        self._ctx = ctx

    def loading_weights(self) -> AbstractContextManager[Any]:
        if self._ctx.precision == "64-true":
            self._ctx.module.double()
        return nullcontext()


def _set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        buffer = module.get_buffer(path)
        if buffer.shape == value.shape:
            buffer.copy_(value)
        else:
            setattr(module.get_submodule(owner), name, value.to(buffer))


def _metric_states(module: nn.Module, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the states of the metrics in a module, which its state dict usually leaves out."""
    states = {}
    for path, metric in module.named_modules():
        if isinstance(getattr(metric, "_defaults", None), dict):
            values = {name: getattr(metric, name) for name in (*metric._defaults, "_update_count")}
            if before is not None:
                values = {name: before.get(f"{path}.{name}", value) for name, value in values.items()}
            if updates := values.pop("_update_count"):
                states[path] = {"updates": updates, "values": {name: _copied(each) for name, each in values.items()}}
    return states


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else [each.detach().clone() for each in value]


def _set_metric_states(module: nn.Module, states: Mapping[str, Any]) -> None:
    for path, state in states.items():
        metric: Any = module.get_submodule(path)
        for name, value in state["values"].items():
            setattr(metric, name, _copied(value) if isinstance(value, list) else value.to(metric.device))
        metric._update_count, metric._computed = state["updates"], None
