"""Batches that are loaded ahead of their step: by a thread, within a bound, and copied on a stream of their own."""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_solo.data.batch_size import tensors_of


class Upload:
    """Copies batches to a CUDA device on a stream of its own.

    Args:
        device: to which.
        move: returns a batch with its tensors on the device.
    """

    def __init__(self, device: torch.device, move: Callable[[Any], Any]) -> None:
        self.device = device
        self.move = move
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Start the copies, and return the batch on the device with the event behind them."""
        with torch.cuda.stream(self.stream):
            return self.move(batch), self.stream.record_event()

    def receive(self, batch: Any, event: Any) -> Any:
        """Return a batch for use on the current stream.

        Its memory is the copy stream's, which would take it for the next batch as soon as the tensor is freed:
        `record_stream` keeps it until the current stream is done.
        """
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        for tensor in tensors_of(batch):
            for part in _strided_parts(tensor):
                if part.is_cuda:
                    part.record_stream(current)
        return batch


class Prefetcher:
    """Iterates over a loader in its order, while a thread loads up to ``depth`` batches ahead.

    The caller loads the first batch itself, and on the first iteration the second one too: then samplers draw their
    seed where they would have, and it is seen whether each batch draws from Python's, NumPy's or torch's global random
    numbers. If so, no batch is loaded ahead: threads share these generators, and the draws of the caller and of the
    thread would come in any order. Other attributes, and ``len``, are the loader's. An error comes with the batch whose
    loading failed. A loader with ``state_dict`` is wrapped by `prefetched`.

    Args:
        loader: any iterable of batches.
        depth: batches that are loaded, and not yet asked for.
        upload: where batches are copied to; None: they stay as they are.
        limit: batches of an iteration that are asked for; no more are loaded.
        on_draws: is called, once, if batches draw random numbers.

    >>> list(Prefetcher([1, 2, 3, 4], depth=2))
    [1, 2, 3, 4]
    """

    _OWN = frozenset({"loader", "depth", "upload", "limit", "on_draws", "closed", "_draws", "_iteration", "_closed_at"})

    def __init__(
        self,
        loader: Any,
        depth: int = 2,
        upload: Upload | None = None,
        limit: float | None = None,
        on_draws: Callable[[], None] = lambda: None,
    ) -> None:
        self.loader = loader
        self.depth = depth
        self.upload = upload
        self.limit = limit
        self.on_draws = on_draws
        self.closed = False
        self._draws: bool | None = None  # None: not seen yet
        self._iteration: Callable[[], _Iteration | None] = lambda: None  # a weak reference
        self._closed_at: Any = None  # the state, where batches were loaded ahead that nobody takes any more

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._stop()
        self._closed_at = None
        iterator: Iterator[Any] = iter(self.loader)
        if self.closed:
            return iterator
        iteration = _Iteration(self, iterator)
        self._iteration = weakref.ref(iteration)
        return iteration

    def __getattr__(self, name: str) -> Any:
        if name in Prefetcher._OWN or (
            name.startswith("__") and name.endswith("__")
        ):  # as in a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is not this object's own on the loader, such as a ``worker_init_fn``."""
        if name in Prefetcher._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __reduce__(self) -> Any:
        """Copy and pickle as a new one, without what is loaded ahead."""
        return type(self), (self.loader, self.depth, None, self.limit)

    def close(self) -> None:
        """End the thread and free what it has loaded; from now on iterate as the loader does."""
        iteration = self._iteration()
        if iteration is not None and iteration.ahead is not None:
            self._closed_at = iteration.ahead.state
        self._stop()
        self.closed = True

    def _stop(self) -> None:
        iteration = self._iteration()
        if iteration is not None:
            iteration.stop()

    def snapshot(self) -> Any:
        """Return what the loader is at, for `state_dict`; None where it can't tell."""
        return None


class StatefulPrefetcher(Prefetcher):
    """A `Prefetcher` over a loader with ``state_dict``, that tells the state as of the last batch it has returned."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in which the loader was when the caller's batch had been loaded."""
        iteration = self._iteration()
        ahead = None if iteration is None else iteration.ahead
        state: dict[str, Any] = (ahead.state if ahead is not None else self._closed_at) or self.loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loader's state, for the next iteration."""
        self._stop()
        self._closed_at = None
        self.loader.load_state_dict(state_dict)

    def snapshot(self) -> Any:
        """Return a copy of the loader's state, which may hold parts that change with the next batch."""
        return deepcopy(self.loader.state_dict())


def prefetched(loader: Any, *args: Any, **kwargs: Any) -> Prefetcher:
    """Return a `Prefetcher`, with ``state_dict`` and ``load_state_dict`` where the loader has both."""
    stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    return (StatefulPrefetcher if stateful else Prefetcher)(loader, *args, **kwargs)


class _Loaded(NamedTuple):
    """What the thread made of one batch: the batch with its event and the loader's state, or an error."""

    batch: Any = None
    event: Any = None
    state: Any = None
    error: BaseException | None = None
    at_limit: bool = False


class _Ahead:
    """The thread and the batches it has loaded.

    Holds no reference to the iterator, so that dropping the iterator stops the thread.

    Attributes:
        state: of the loader, as of the caller's last batch.
    """

    def __init__(self, owner: Prefetcher, iterator: Iterator[Any], limit: float) -> None:
        self.state = owner.snapshot()
        self.upload = owner.upload
        self._snapshot = owner.snapshot
        self._iterator = iterator
        self._left = limit
        self._loaded: SimpleQueue[_Loaded] = SimpleQueue()
        self._slots = threading.Semaphore(owner.depth)
        self._stopped = False
        # a daemon: a program that ends in the middle of an iteration doesn't wait for the loader
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._slots.acquire()
            if self._stopped:
                return
            loaded = self._load()
            ends = loaded.error is not None or loaded.at_limit
            self._loaded.put(loaded)
            del loaded  # else the thread keeps it while it waits
            if ends:
                return

    def _load(self) -> _Loaded:
        if self._left <= 0:
            return _Loaded(at_limit=True)
        self._left -= 1
        try:
            batch, event = next(self._iterator), None
            state = self._snapshot()
            if self.upload is not None:
                batch, event = self.upload.send(batch)
        except BaseException as error:  # StopIteration among them; the caller raises it
            return _Loaded(error=error)
        return _Loaded(batch, event, state)

    def take(self) -> _Loaded:
        """Return what comes next, and make room for another one."""
        loaded = self._loaded.get()
        self._slots.release()
        return loaded

    def stop(self) -> None:
        """End the thread, behind the batch that it is loading."""
        self._stopped = True
        self._slots.release()
        if self._thread is not threading.current_thread():  # which may happen to collect the iteration
            self._thread.join()


class _Iteration(Iterator[Any]):
    """One iteration: the caller loads, until a thread does so ahead."""

    def __init__(self, owner: Prefetcher, iterator: Iterator[Any]) -> None:
        self.ahead: _Ahead | None = None
        self._owner = owner
        self._iterator = iterator
        self._count = 0
        self._at_limit = False
        self._finalizer: Any = None

    def __next__(self) -> Any:
        if self.ahead is None:
            return self._load()
        loaded = self.ahead.take()
        if loaded.error is None and not loaded.at_limit:
            self._count += 1
            self.ahead.state = loaded.state
            if self.ahead.upload is not None:
                return self.ahead.upload.receive(loaded.batch, loaded.event)
            return loaded.batch
        self.stop()
        if loaded.error is not None:
            try:
                raise loaded.error
            finally:
                del loaded  # the error's traceback would lead to it in a circle
        self._at_limit = True
        return self._load()

    def _load(self) -> Any:
        """Load a batch here, and have the thread load the next ones if that changes nothing else."""
        owner = self._owner
        seen = _random_states() if owner._draws is None and self._count == 1 else None
        batch = next(self._iterator)
        self._count += 1
        if seen is not None:
            owner._draws = seen != _random_states()
            if owner._draws:
                owner.on_draws()
        if owner._draws is False and not self._at_limit and not owner.closed:
            limit = float("inf") if owner.limit is None else owner.limit - self._count
            self.ahead = _Ahead(owner, self._iterator, limit)
            self._finalizer = weakref.finalize(self, self.ahead.stop)
            self._finalizer.atexit = False
        return batch

    def stop(self) -> None:
        """End the thread and free what it has loaded."""
        if self.ahead is not None:
            self._finalizer.detach()
            self.ahead.stop()
            self.ahead = None


def _random_states() -> list[Any]:
    """Return the states of the global generators that a data set may draw from."""
    states: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states.append((kind, keys.tobytes(), rest))
    return states


def _strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in which one is stored: itself, but for sparse ones."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()
