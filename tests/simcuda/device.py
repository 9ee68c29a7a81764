"""A simulated CUDA device for torch's CPU build, with a detector of races between streams.

Tensors on ``cuda`` are stored on the host, and operators run on the CPU at once. So results are right even if missing
synchronisation could make them wrong on a GPU. The race detector finds such places, and `delayed` makes their numbers
wrong.

    from tests.simcuda import device
    device.install()              # before torch is imported
    import torch
    with device.counted() as counts:
        torch.ones(4, device="cuda").sum().item()
    assert counts.kernels == 2 and counts.synchronisations == 1 and not device.races()

It doesn't simulate time, the rounding of cuBLAS, kernels of Triton and other libraries (`launch` represents one),
processes that share a device, CUDA graphs, or a second device. All threads of the host count as one timeline. An access
to a strided tensor counts as an access to the range from its first byte to its last.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.simcuda import build

if TYPE_CHECKING:
    from torch import Tensor

HOST = -1
DELAYS = ("none", "copies", "all")
_native: ModuleType | None = None


def install() -> None:
    """Give torch its CUDA device; a second call does nothing.

    Raises:
        UnavailableError: torch has been imported, or the device's library can't be built here.
    """
    global _native
    if _native is not None:
        return
    if "torch" in sys.modules:
        raise build.UnavailableError(
            "torch is imported already, and looks for a CUDA device but once: call install() before, or run"
            " `python -m pytest -p tests.simcuda.plugin` or `python -m tests.simcuda script.py`"
        )
    library = str(build.library())
    torch_libraries = build.torch_folder() / "lib"
    for name in ("libtorch_global_deps", "libc10", "libtorch_cpu", "libtorch", "libtorch_python"):
        ctypes.CDLL(str(torch_libraries / f"{name}.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # its hooks are there when torch looks for them

    import torch  # noqa: F401

    spec = importlib.util.spec_from_file_location(build.NAME, library)
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    here = Path(__file__).resolve().parent
    native.set_library_folders(
        [f"{build.torch_folder()}/", *(str(here / name) for name in ("device.py", "bindings.py"))]
    )
    _native = native

    from tests.simcuda import bindings

    bindings.bind(native)


def is_installed() -> bool:
    """Return whether ``cuda`` is the simulated device."""
    return _native is not None


def native() -> Any:
    """Return the compiled module.

    Raises:
        UnavailableError: the device isn't installed.
    """
    if _native is None:
        raise build.UnavailableError("the simulated CUDA device isn't installed")
    return _native


# --- races ---


class Access(NamedTuple):
    """Bytes read or written by a piece of work."""

    name: str
    writes: bool
    stream: int
    """CUDA's number of it, `HOST` for the host."""
    bytes: int
    line: str
    """``file.py:12``; ``backward of MulBackward0`` where no Python ran; empty if neither."""

    def __str__(self) -> str:
        where = "the host" if self.stream == HOST else f"stream {self.stream}"
        return f"{'write' if self.writes else 'read'} by {self.name} on {where} ({self.line or 'no Python line'})"


class Race(NamedTuple):
    """Two accesses to the same bytes in no defined order, at least one of them a write."""

    kind: str
    """"unordered", "unregistered" (memory whose pin is taken while a copy uses it) or "unmapped"."""
    later: Access
    earlier: Access

    def __str__(self) -> str:
        if self.kind == "unordered":
            return f"{self.later}\n    is not ordered behind the {self.earlier}"
        if self.later == self.earlier:
            return f"{self.later.name} of memory that is no longer mapped ({self.later.line})"
        verb = {"unregistered": "is no longer pinned", "unmapped": "is no longer mapped"}[self.kind]
        return f"memory {verb}, by {self.later.name} ({self.later.line}),\n    during the {self.earlier}"


def races() -> list[Race]:
    """Return the races since the last call, each pair of lines once."""
    return [Race(kind, _access(later), _access(earlier)) for kind, later, earlier in native().take_races()]


def _access(given: dict[str, Any]) -> Access:
    return Access(given["name"], given["writes"], given["timeline"] - 1, given["bytes"], given["line"])


def forget() -> None:
    """Forget all accesses and races, as if the host had waited for the device."""
    native().forget_all()


@contextmanager
def delayed(what: str = "copies") -> Iterator[None]:
    """Delay effects until other work is ordered after them, so that a wrong order gives wrong numbers.

    Args:
        what: ``"copies"`` delays the reads and writes of copies between pinned memory and the device; ``"all"`` delays
            the results of kernels too.
    """
    native().set_delays(DELAYS.index(what))
    try:
        yield
    finally:
        native().set_delays(0)


# --- counts ---


class Operation(NamedTuple):
    """One launched operation; operations are kept in the order of the launches."""

    kind: str
    """"kernel", "up", "down", "within", "record", "wait", "synchronise", "register", "unregister"."""
    name: str
    stream: int
    bytes: int
    """Read and written by a kernel, moved by a copy."""
    pinned: bool
    event: int
    """The number of the event that is recorded or waited for."""
    line: str


@dataclass
class Counts:
    """The operations that were launched; complete after the context ends."""

    operations: list[Operation] = field(default_factory=list)
    peak_allocated: int = 0
    peak_reserved: int = 0

    @property
    def kernels(self) -> int:
        """Kernels launched."""
        return sum(one.kind == "kernel" for one in self.operations)

    @property
    def kernels_by_name(self) -> Counter[str]:
        """Kernels launched, by operator."""
        return Counter(one.name for one in self.operations if one.kind == "kernel")

    @property
    def synchronisations(self) -> int:
        """Times that the host waited for the device."""
        return sum(one.kind == "synchronise" for one in self.operations)

    def copies(self, direction: str, *, pinned: bool | None = None) -> int:
        """Return how many copies there were "up" to the device, "down" to the host or "within" the device."""
        return len(self._of(direction, pinned))

    def copied_bytes(self, direction: str, *, pinned: bool | None = None) -> int:
        """Return the bytes that were copied; of pinned or pageable memory of the host, or both."""
        return sum(one.bytes for one in self._of(direction, pinned))

    def by_stream(self) -> dict[int, list[Operation]]:
        """Return the operations of each stream; those of the host, synchronisations among them, under `HOST`."""
        streams: dict[int, list[Operation]] = {}
        for one in self.operations:
            streams.setdefault(one.stream, []).append(one)
        return streams

    def _of(self, direction: str, pinned: bool | None) -> list[Operation]:
        if direction not in ("up", "down", "within"):
            raise ValueError(f"direction {direction!r}: write 'up', 'down' or 'within'")
        return [one for one in self.operations if one.kind == direction and pinned in (None, one.pinned)]


_counting = 0


@contextmanager
def counted() -> Iterator[Counts]:
    """Yield the counts of operations launched in the context; contexts may be nested."""
    global _counting
    native_module, counts = native(), Counts()
    native_module.set_recording(True)
    _counting += 1
    first = native_module.operation_count()
    native_module.begin_peaks()
    try:
        yield counts
    finally:
        counts.peak_allocated, counts.peak_reserved = native_module.end_peaks()
        counts.operations = [Operation(*one) for one in native_module.operations_from(first)]
        _counting -= 1
        if not _counting:
            native_module.set_recording(False)


# --- kernels of our own, memory ---


def launch(
    name: str, body: Callable[..., object], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
) -> None:
    """Run a function as one kernel on the current stream.

    Args:
        name: name of the kernel in counts and races.
        body: function of CPU tensors that share the memory of ``reads``, then of ``writes``, in their order.
        reads: tensors on the device, or in pinned memory of the host.
        writes: the same; they may be among those read.
    """
    tensors = [on_host(tensor) for tensor in (*reads, *writes)]
    native().launch_begin(name, list(reads), list(writes))
    try:
        body(*tensors)
    finally:
        native().launch_end()


def on_host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor that shares a tensor's memory without the detector; keep the tensor while it is used."""
    made: Tensor = native().host_alias(tensor.detach())
    return made


def touch_on_host(tensor: Tensor, *, writes: bool, name: str) -> None:
    """Report to the race detector that the host reads or writes pinned memory without an operator of torch."""
    native().touch_on_host(tensor.data_ptr(), tensor.nbytes, writes, name)


@contextmanager
def memory_of(total_bytes: int) -> Iterator[None]:
    """Set the size of the device's memory in this context."""
    before = native().total_bytes()
    native().set_total_bytes(total_bytes)
    try:
        yield
    finally:
        native().set_total_bytes(before)
