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
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no room for the workspace of its handle
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "FIND was unable to find an engine to execute this computation",  # each one that was tried had no workspace
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
"""In other errors than those: behind an invalid access the device can't be used any more."""


def is_out_of_memory(error: BaseException, outer: BaseException | None = None) -> bool:
    """Return whether an error, or one that it was raised from, says that device or host had too little memory.

    An error that was raised while another one was handled counts by that one too, unless by ``from None`` its author
    said otherwise, or it says that the device is lost, as after an invalid access.

    Args:
        error: what was raised.
        outer: what was being handled before the work began, and says nothing of it.

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
