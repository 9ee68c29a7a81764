"""What Triton's interpreter lacks to run Liger's kernels: floats as tensors, sums in bf16, and two CUDA functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import triton
import triton.language as tl
from liger_kernel.ops import cross_entropy, geglu, layer_norm, rms_norm
from triton.runtime import interpreter

from lightning_solo.attributes import replaced


@triton.jit
def rsqrt(x):  # type: ignore[no-untyped-def]
    return 1 / tl.sqrt(x)


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@contextmanager
def runs_liger() -> Iterator[None]:
    """Run Liger's kernels in Triton's interpreter, with Python floats as fp32, as in a compiled kernel."""
    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if isinstance(argument, float):
            value = np.array([argument], dtype=np.float32)
            return tl.tensor(interpreter.TensorHandle(value, tl.float32), tl.float32)
        return convert(argument)

    builder, compute = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.binary_op

    def in_fp32(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:  # NumPy has no bf16: its bits are kept as integers
        if lhs.dtype.scalar != tl.bfloat16 or op not in (np.add, np.subtract, np.multiply, np.divide):
            return compute(self, lhs, rhs, op)
        exact = compute(self, self.cast_impl(lhs, tl.float32), self.cast_impl(rhs, tl.float32), op)
        return self.cast_impl(exact, tl.bfloat16)

    with ExitStack() as stack, np.errstate(all="ignore"):
        stack.enter_context(replaced(interpreter, "_implicit_cvt", with_floats))
        stack.enter_context(replaced(builder, "binary_op", in_fp32))
        for module in (rms_norm, layer_norm):
            stack.enter_context(replaced(module, "rsqrt", rsqrt))
        for module in (geglu, cross_entropy):
            stack.enter_context(replaced(module, "tanh", tanh))
        yield
