"""The functions of CUDA's runtime that ``torch.cuda`` calls and the CPU build lacks, by the simulated device."""

from __future__ import annotations

import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)
NAME = "NVIDIA H200"


class Stream(torch.Stream):
    """A stream of the simulated device."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        """Take the next one of the pool, or with ``stream_id`` that one."""
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=DEVICE, priority=priority)

    def wait_stream(self, other: torch.Stream) -> None:
        """Make this stream wait for all work launched on another stream so far."""
        self.wait_event(other.record_event())

    def record_event(self, event: Any = None) -> Any:
        """Record an event after all work launched on this stream so far."""
        event = Event() if event is None else event
        event.record(self)
        return event

    @property
    def cuda_stream(self) -> int:
        """The stream's number, in place of a pointer."""
        return self.stream_id

    def __enter__(self) -> Stream:
        self._before = current_stream()
        torch.accelerator.set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        torch.accelerator.set_stream(self._before)


class Event(torch.Event):
    """An event of the simulated device."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> Event:
        """Make one whose time is that of the host as it was recorded."""
        return super().__new__(cls, DEVICE, enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        """Record after all work launched so far on a stream, by default the current one."""
        super().record(stream or current_stream())
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end_event: Any) -> float:
        """Return the host's milliseconds up to another event, since the device has no clock."""
        return max(1e-6, (end_event._recorded_s - self._recorded_s) * 1e3)

    def wait(self, stream: Any = None) -> None:
        """Make a stream, by default the current one, wait for this event."""
        super().wait(stream or current_stream())


def current_stream(device: Any = None) -> Stream:
    """Return the stream on which this thread launches."""
    stream = torch.accelerator.current_stream()
    return Stream(stream_id=stream.stream_id, device_index=0, device_type=stream.device_type)


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Launch on a stream; on the current one if it is None."""
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(before if stream is None else stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


class DeviceContext:
    """Replaces ``torch.cuda.device``; there is only one device."""

    def __init__(self, device: Any = None) -> None:
        self.idx = self.prev_idx = 0

    def __enter__(self) -> DeviceContext:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def bind(native: Any) -> None:
    """Install the device's functions in ``torch.cuda``."""
    _put(_properties(native))  # first, for the others ask whether there is a device
    _put(_streams() | _memory(native) | _random(native))
    _names_of_the_extension(native)
    _watch_reads_by_others(native)
    _group_of_one_process()
    _storages()
    torch.version.cuda = "13.0"


def _put(answers: dict[str, Any]) -> None:
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        for name, value in answers.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)


def _streams() -> dict[str, Any]:
    default = Stream(stream_id=0, device_index=0, device_type=current_stream().device_type)
    return {
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "device": DeviceContext,
        "device_of": DeviceContext,
        "current_stream": current_stream,
        "default_stream": lambda device=None: default,
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(DEVICE),
        "is_current_stream_capturing": lambda: False,
        "ipc_collect": lambda: None,
        "_sleep": lambda cycles: None,
    }


def _memory(native: Any) -> dict[str, Any]:
    def get(name: str) -> Any:
        return lambda device=None: native.memory_stats()[name]

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        total = native.total_bytes()
        return total - native.memory_stats()["reserved"], total

    def nested(device: Any = None) -> dict[str, Any]:
        stats = native.memory_stats()

        def both(current: str, peak: str) -> dict[str, Any]:
            return {"all": {"current": stats[current], "peak": stats[peak], "allocated": 0, "freed": 0}}

        return {
            "allocated_bytes": both("allocated", "peak_allocated"),
            "active_bytes": both("allocated", "peak_allocated"),
            "reserved_bytes": both("reserved", "peak_reserved"),
            "requested_bytes": both("requested", "requested"),
            "segment": both("segments", "segments"),
            "num_alloc_retries": stats["retries"],
            "num_ooms": stats["out_of_memory"],
        }

    def flat(device: Any = None) -> dict[str, Any]:
        made = {}
        for name, value in nested().items():
            if isinstance(value, dict):
                made.update({f"{name}.all.{which}": number for which, number in value["all"].items()})
            else:
                made[name] = value
        return made

    def record_history(enabled: str | None = "all", *args: Any, max_entries: int = 2**31, **kwargs: Any) -> None:
        native.record_history(max_entries if enabled else 0)

    class Runtime:
        """CUDA's runtime, as ``torch.cuda.cudart()`` returns it."""

        cudaError = types.SimpleNamespace(success=0)  # noqa: N815
        cudaHostRegister = staticmethod(lambda address, size, flags: native.register_host(address, size))  # noqa: N815
        cudaHostUnregister = staticmethod(native.unregister_host)  # noqa: N815
        cudaMemGetInfo = staticmethod(mem_get_info)  # noqa: N815

    return {
        "mem_get_info": mem_get_info,
        "memory_allocated": get("allocated"),
        "max_memory_allocated": get("peak_allocated"),
        "memory_reserved": get("reserved"),
        "max_memory_reserved": get("peak_reserved"),
        "memory_stats": flat,
        "memory_stats_as_nested_dict": nested,
        "host_memory_stats": lambda: {"allocated_bytes.current": native.memory_stats()["pinned"]},
        "reset_peak_memory_stats": lambda device=None: native.reset_peaks(),
        "reset_accumulated_memory_stats": lambda device=None: None,
        "empty_cache": native.empty_cache,
        "memory_summary": lambda *args, **kwargs: str(native.memory_stats()),
        "_record_memory_history": record_history,
        "_snapshot": lambda device=None, **kwargs: native.snapshot(),
        "memory_snapshot": lambda mempool_id=None, include_traces=True: native.snapshot()["segments"],
        "get_allocator_backend": lambda: "native",
        "cudart": Runtime,
    }


def _random(native: Any) -> dict[str, Any]:
    return {
        "manual_seed": native.seed,
        "manual_seed_all": native.seed,
        "seed": lambda: native.seed(torch.seed()),
        "seed_all": lambda: native.seed(torch.seed()),
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device=None: native.random_state(),
        "get_rng_state_all": lambda: [native.random_state()],
        "set_rng_state": lambda state, device=None: native.set_random_state(state),
        "set_rng_state_all": lambda states: native.set_random_state(states[0]),
    }


def _properties(native: Any) -> dict[str, Any]:
    properties = types.SimpleNamespace(
        name=NAME,
        total_memory=native.total_bytes(),
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=60 * 2**20,
        memory_bus_width=6144,
        memory_clock_rate=3201000,
        clock_rate=1980000,
        gcnArchName="",
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid="0",
        pci_bus_id=0,
    )

    def get_device_properties(device: Any = None) -> Any:
        properties.total_memory = native.total_bytes()
        return properties

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,
        "device_count": lambda: 1,
        "_device_count_nvml": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": get_device_properties,
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "utilization": lambda device=None: 0,
        "can_device_access_peer": lambda device, peer: False,
        "current_blas_handle": lambda: 0,
    }


def _names_of_the_extension(native: Any) -> None:
    """Add the names that ``torch._C`` has in CUDA builds only and that libraries look up."""
    names = {
        "_cuda_getCurrentRawStream": lambda device: torch.accelerator.current_stream().stream_id,
        "_cuda_setDevice": lambda device: None,
        "_cuda_getDevice": lambda: 0,
        "_cuda_exchangeDevice": lambda device: 0,
        "_cuda_maybeExchangeDevice": lambda device: 0,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_isHistoryEnabled": native.records_history,
        "_cuda_cudaHostAllocator": lambda: 0,
    }
    for name, value in names.items():
        if not hasattr(torch._C, name):
            setattr(torch._C, name, value)


def _storages() -> None:
    """Support the creation of storages on the device, which loading files and copying tensors need."""
    plain = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda" and args and isinstance(args[0], int):
            return torch.empty(args[0], dtype=torch.uint8, device=DEVICE).untyped_storage()
        return plain(cls, *args, **kwargs) if device is None else plain(cls, *args, device=device, **kwargs)

    torch.UntypedStorage.__new__ = new


def _group_of_one_process() -> None:
    """Replace NCCL's group of one process by torch's fake group, with collectives that copy this process's tensors."""
    group = torch._C._distributed_c10d.FakeProcessGroup
    group._set_sequence_number_for_group = lambda self: None
    collectives = torch.distributed.distributed_c10d

    class AnyGroup(type):
        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, group)

    class ProcessGroupNCCL(metaclass=AnyGroup):
        class Options:
            pass

        def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            if size != 1:
                raise RuntimeError(f"the simulated CUDA device is of one process, not of {size}")
            return group._create_internal(rank, size)

    for module in (torch.distributed, collectives):
        vars(module).update(is_nccl_available=lambda: True, ProcessGroupNCCL=ProcessGroupNCCL)
    vars(collectives)["default_pg_nccl_timeout"] = collectives.default_pg_timeout
    torch.cuda.nccl.version = lambda: (2, 27, 3)
    vars(torch.cuda.nvtx).update(range_push=lambda text: 0, range_pop=lambda: 0, mark=lambda text: None)


def _watch_reads_by_others(native: Any) -> None:
    """Report reads of host memory that no operator makes (NumPy, lists, files) to the race detector."""

    def reading(method: Any, name: str) -> Any:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.device.type == "cpu" and self.layout == torch.strided and type(self) in _PLAIN and self.numel():
                native.touch_on_host(self.data_ptr(), self.nbytes, False, name)
            return method(self, *args, **kwargs)

        return read

    for name in ("numpy", "tolist", "__reduce_ex__", "__array__", "__dlpack__"):
        setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name), name))


_PLAIN = (torch.Tensor, torch.nn.Parameter)
