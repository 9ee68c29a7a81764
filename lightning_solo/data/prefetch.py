"""Loading of batches ahead of their step by a thread, with copies on a separate stream."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_solo.data.nested import tensors_of
from lightning_solo.random_states import get_states, global_sources, same


class Upload:
    """Copies batches to a CUDA device on its own stream.

    Args:
        device: target of the copies.
        move: returns a batch with its tensors on the device.
    """

    def __init__(self, device: torch.device, move: Callable[[Any], Any]) -> None:
        self.device = device
        self.move = move
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: Any) -> tuple[Any, Any]:
        """Start the copies; return the batch on the device, and the event after them."""
        with torch.cuda.stream(self.stream):
            return self.move(batch), self.stream.record_event()

    def receive(self, batch: Any, event: Any) -> Any:
        """Return a batch for use on the current stream.

        Its memory belongs to the copy stream, which would reuse it as soon as a tensor is freed. ``record_stream``
        keeps it until the current stream is done.
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

    The caller loads the first batch itself, and in the first iteration the second one too. So samplers draw their seed
    at the usual time, and draws from the global generators of Python, NumPy or torch are detected. If batches draw from
    these, none is loaded ahead: threads share the generators, so their draws would interleave unpredictably. An error
    is raised at the batch that failed to load. Other attributes, and ``len``, are the loader's. For a loader with
    ``state_dict`` use `prefetched`.

    Args:
        loader: any iterable of batches.
        depth: batches that are loaded ahead.
        upload: copies the batches to a device; None for no copy.
        limit: largest number of batches that are loaded in an iteration.
        on_draws: called once if batches draw random numbers.

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
        self._draws: bool | None = None  # whether batches draw random numbers; None: unknown yet
        self._iteration: Callable[[], _Iteration | None] = lambda: None  # a weak reference
        self._closed_at: Any = None  # the state at the last returned batch, if others were discarded

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
        if name in Prefetcher._OWN or (name.startswith("__") and name.endswith("__")):  # during a copy, for example
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set other attributes, such as a ``worker_init_fn``, on the loader."""
        if name in Prefetcher._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __reduce__(self) -> Any:
        """Return the arguments of a new object, so that copies and pickles have no batches loaded ahead."""
        return type(self), (self.loader, self.depth, None, self.limit)

    def close(self) -> None:
        """Stop the thread and free its batches; later iterations load in the caller."""
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
        """Return the loader's state for `state_dict`; None for a loader without one."""
        return None


class StatefulPrefetcher(Prefetcher):
    """A `Prefetcher` for a loader with ``state_dict``; its state is the loader's after the last returned batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch that the caller received."""
        iteration = self._iteration()
        ahead = None if iteration is None else iteration.ahead
        state: dict[str, Any] = (ahead.state if ahead is not None else self._closed_at) or self.loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the loader's state for the next iteration."""
        self._stop()
        self._closed_at = None
        self.loader.load_state_dict(state_dict)

    def snapshot(self) -> Any:
        """Return a copy of the loader's state, which may change with the next batch."""
        return deepcopy(self.loader.state_dict())


def prefetched(loader: Any, *args: Any, **kwargs: Any) -> Prefetcher:
    """Return a `Prefetcher`, with ``state_dict`` and ``load_state_dict`` where the loader has both."""
    stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    return (StatefulPrefetcher if stateful else Prefetcher)(loader, *args, **kwargs)


class _Loaded(NamedTuple):
    """A batch loaded by the thread, with its event and the loader's state; or an error."""

    batch: Any = None
    event: Any = None
    state: Any = None
    error: BaseException | None = None
    at_limit: bool = False


class _Ahead:
    """The thread and the batches it has loaded.

    Holds no reference to the `_Iteration`, so that dropping the iteration stops the thread.

    Attributes:
        state: the loader's state after the last batch that the caller received.
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
        # a daemon, so that a program that ends within an iteration doesn't wait for the loader
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
            del loaded  # or the thread keeps it while it waits
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
        except BaseException as error:  # including StopIteration; the caller raises it
            return _Loaded(error=error)
        return _Loaded(batch, event, state)

    def take(self) -> _Loaded:
        """Return the next batch, and make room for another one."""
        loaded = self._loaded.get()
        self._slots.release()
        return loaded

    def stop(self) -> None:
        """Stop the thread after the batch that it is loading."""
        self._stopped = True
        self._slots.release()
        if self._thread is not threading.current_thread():  # the thread itself may collect the iteration
            self._thread.join()


class _Iteration(Iterator[Any]):
    """One iteration: the caller loads until a thread loads ahead."""

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
                del loaded  # or the error's traceback makes a reference cycle
        self._at_limit = True
        return self._load()

    def _load(self) -> Any:
        """Load a batch in the caller, and start the thread if batches draw no random numbers."""
        owner = self._owner
        seen = get_states(global_sources()) if owner._draws is None and self._count == 1 else None
        batch = next(self._iterator)
        self._count += 1
        if seen is not None:
            owner._draws = not same(seen, get_states(global_sources()))
            if owner._draws:
                owner.on_draws()
        if owner._draws is False and not self._at_limit and not owner.closed:
            limit = float("inf") if owner.limit is None else owner.limit - self._count
            self.ahead = _Ahead(owner, self._iterator, limit)
            self._finalizer = weakref.finalize(self, self.ahead.stop)
            self._finalizer.atexit = False
        return batch

    def stop(self) -> None:
        """Stop the thread and free its batches."""
        if self.ahead is not None:
            self._finalizer.detach()
            self.ahead.stop()
            self.ahead = None


def _strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors in which a tensor is stored: several for a sparse one, else itself."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()
