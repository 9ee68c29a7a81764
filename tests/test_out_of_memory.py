"""Which errors mean too little memory, by their texts and by what they were raised from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_solo.errors import BudgetError
from lightning_solo.out_of_memory import is_out_of_memory

SHORT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.93 GiB"),
    torch.OutOfMemoryError("XPU out of memory. Tried to allocate 2.00 GiB"),
    torch.OutOfMemoryError(),  # of a library's own, without a text
    MemoryError(),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: out of memory", 2),
    RuntimeError(2, "CUDA error: out of memory"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("cudaErrorMemoryAllocation: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    RuntimeError("FIND was unable to find an engine to execute this computation"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling `cusparseSpMM`"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError("hipErrorOutOfMemory: out of memory"),
    RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("miopenStatusAllocFailed"),
    RuntimeError("MPS backend out of memory (MPS allocated: 5.00 GiB, other allocations: 1.00 GiB)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:83] data. DefaultCPUAllocator: not enough memory"),
    RuntimeError("std::bad_alloc"),
]

OTHER = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError("Trying to backward through the graph a second time"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError(),
    ValueError("CUDA out of memory"),  # a text that someone quotes: torch raises it as a RuntimeError
    KeyboardInterrupt("CUDA out of memory"),
    SystemExit("CUDA out of memory"),
    BudgetError("CUDA out of memory"),  # has been dealt with
]


@pytest.mark.parametrize("error", SHORT, ids=lambda error: str(error)[:40] or type(error).__name__)
@pytest.mark.row(64)
def test_too_little_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHER, ids=lambda error: str(error)[:40] or type(error).__name__)
@pytest.mark.row(64)
def test_anything_else(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_host_error_of_torch_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_out_of_memory(caught.value)


def raised(error: BaseException, while_handling: BaseException, **cause: Any) -> BaseException:
    """Return an error as it is after it was raised while another one was handled, ``from`` a cause if there is one."""
    try:
        try:
            raise while_handling
        except type(while_handling):
            if cause:
                raise error from cause["cause"]
            raise error  # noqa: B904  (the case)
    except type(error) as caught:
        return caught


@pytest.mark.row(64)
def test_cause_of_an_error_counts() -> None:
    short, wrapped = torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("the layer failed")
    assert is_out_of_memory(raised(ValueError("the step failed"), raised(wrapped, short, cause=short)))


def test_context_of_an_error_counts_unless_from_none() -> None:
    assert is_out_of_memory(raised(RuntimeError("no such layer"), MemoryError()))
    assert not is_out_of_memory(raised(RuntimeError("no such layer"), MemoryError(), cause=None))


def test_a_cause_counts_and_not_what_was_handled_besides() -> None:
    assert not is_out_of_memory(raised(RuntimeError("no such layer"), MemoryError(), cause=KeyError("layer")))


@pytest.mark.parametrize("last", [KeyboardInterrupt(), BudgetError("too little")], ids=["interrupted", "dealt with"])
def test_an_interrupt_or_an_error_of_ours_is_what_it_is(last: BaseException) -> None:
    assert not is_out_of_memory(raised(last, MemoryError(), cause=MemoryError()))


LOST = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS"),
    RuntimeError("HIP error: unspecified launch failure"),
]


@pytest.mark.parametrize("last", LOST, ids=str)
def test_a_device_that_is_lost_while_memory_is_short(last: BaseException) -> None:
    assert not is_out_of_memory(raised(last, MemoryError()))
    assert not is_out_of_memory(raised(last, MemoryError(), cause=MemoryError()))
    assert not is_out_of_memory(raised(RuntimeError("the layer failed"), MemoryError(), cause=last))


def test_error_handled_before_the_work_does_not_count() -> None:
    outer = MemoryError()
    error = raised(RuntimeError("shapes differ"), outer)
    assert is_out_of_memory(error)
    assert not is_out_of_memory(error, outer)
    assert is_out_of_memory(raised(torch.OutOfMemoryError(), outer), outer)


def test_a_circle_of_causes_ends() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert not is_out_of_memory(one)
