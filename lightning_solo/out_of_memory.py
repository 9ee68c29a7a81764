"""Recognises out-of-memory errors of torch, its libraries and operating systems."""

from __future__ import annotations

from lightning_solo.errors import SoloError

DEVICE_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorMemoryAllocation",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no memory for its handle's workspace
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "FIND was unable to find an engine to execute this computation",  # no engine had a workspace
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
    "CUFFT_ALLOC_FAILED",
    "HIP out of memory",
    "HIP error: out of memory",
    "hipErrorOutOfMemory",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "miopenStatusAllocFailed",
    "MPS backend out of memory",
    "XPU out of memory",
)
HOST_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
)


LOST_DEVICE = ("CUDA error", "CUDA driver error", "HIP error", "device-side assert", "ILLEGAL_ADDRESS")
"""Words of errors after which the device can't be used, such as an invalid access."""


def is_out_of_memory(error: BaseException, outer: BaseException | None = None) -> bool:
    """Return whether device or host had too little memory, by an error, its causes and its contexts.

    ``from None`` hides the context. An error about a lost device, as after an invalid access, ends the search.

    Args:
        error: the raised error.
        outer: an error that was being handled before the work began; the search ends before it.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory", 2)), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and link is not outer and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, SoloError) or not isinstance(link, Exception):
            return False
        kinds = {cls.__name__ for cls in type(link).__mro__}
        text = " ".join(map(str, link.args))
        if kinds & {"OutOfMemoryError", "MemoryError"}:
            return True
        if isinstance(link, RuntimeError) and any(words in text for words in DEVICE_MEMORY + HOST_MEMORY):
            return True
        if any(words in text for words in LOST_DEVICE):
            return False
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False
