"""The step of compact states and the sum of gradients on a GPU, in Triton: `adamw_update.update_blocks` in one pass.

A program steps ``ROWS`` blocks of 128 elements. A launch steps one piece whose addresses are arguments, or many pieces
whose addresses and scalars are rows of a table. Importing this module imports Triton.

Each operation rounds as torch's does on a CPU. A product is added with one rounding only where `tl.fma` does it
(compile with ``enable_fp_fusion=False``). Quotients and roots round as IEEE 754 requires. They are refined from the
device's approximations without a branch, since the compiler's own, which branch for extremes, take half as many
instructions again. None of 10**8 random quotients and roots differed from IEEE 754's. `_code_of_first` refines once
instead of twice: 23 of its quotients differed, and no code.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)  # `compressed_moments.BLOCK`
PER_PARTIAL = tl.constexpr(2**14)  # `kernels.PER_PARTIAL`
PER_SUM = tl.constexpr(2**11)  # elements of a gradient that a program adds up at once

COLUMNS = tl.constexpr(22)  # of the table of `step_many`, as `triton_launches` writes it
SUM_COLUMNS = tl.constexpr(6)  # of that of `add_many`

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
QUIET_NAN = tl.constexpr(0x7FC00000)
UPPER = tl.constexpr(-0x10000)
TINY = tl.constexpr(2.0**-126)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: a sum with it has no bits below 1, and its lower bits are the integer
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
PER_ROW = tl.constexpr(3242174889 - 2**32)  # `random_numbers`
PER_COLUMN = tl.constexpr(0.5698402909980532)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _reciprocal(x):
    """Return 1 / x within 1 unit of the last place, of a normal number below 2**126."""
    if IS_INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _reciprocal_root(x):
    """Return 1 / sqrt(x) within 2 units of the last place, of a normal number."""
    if IS_INTERPRETED:
        return 1.0 / tl.sqrt_rn(x)
    return tl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _fast_root(x):
    """Return sqrt(x) within 2 units of the last place, of 0 and of a normal number."""
    if IS_INTERPRETED:
        return tl.sqrt_rn(x)
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _quotient(a, b, near):
    """Return a / b from an approximate 1 / b: P. Markstein (1990), as ptxas has it, without its branch for extremes."""
    guess = a * near
    return tl.fma(tl.fma(-b, guess, a), near, guess)


@triton.jit
def _refined(near, b):
    """Return a closer approximation of 1 / b."""
    return tl.fma(near, tl.fma(-b, near, 1.0), near)


@triton.jit
def _root(x):
    """Return sqrt(x) of 0 and positive numbers; those below 2**-64 are scaled by 2**64, so that nothing underflows."""
    is_small = x < 5.421010862427522e-20
    x = tl.where(is_small, x * 18446744073709551616.0, x)
    near = _reciprocal_root(tl.maximum(x, 7.52316384526264e-37))
    guess = x * near
    root = tl.fma(tl.fma(-guess, guess, x), 0.5 * near, guess)
    return tl.where(is_small, root * 2.3283064365386963e-10, root)


@triton.jit
def _uniform(row, column, seed):
    """Return `random_numbers.uniform` of rows and columns."""
    start = (((row * PER_ROW + seed) >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08
    number = start[:, None] + (column.to(tl.float32) * PER_COLUMN)[None, :]
    return number - tl.floor(number)


@triton.jit
def _join(weight, correction, BITS: tl.constexpr):
    """Return the fp32 master of a bf16 weight, as fp32, and its correction."""
    units = correction.to(tl.int32)
    units = tl.where(weight == 0.0, tl.maximum(units, 0), units)
    return _float(_bits(weight) + (units << (32 - BITS)))


@triton.jit
def _nearest_bf16(raw):
    """Return the nearest bf16, ties to even, as the bits of an fp32.

    It is computed in integers, since the interpreter's cast doesn't carry into the exponent.
    """
    return (raw + 0x7FFF + ((raw >> 16) & 1)) & UPPER


@triton.jit
def _upper_half(raw):
    """Return the bf16 of the upper 16 of 32 bits."""
    return (raw >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _split(master, BITS: tl.constexpr):
    """Return the nearest bf16 in the upper 16 bits, and the correction of the master."""
    raw = tl.where(master == master, _bits(master), QUIET_NAN)
    if BITS == 32:
        upper = (raw + 0x8000) & UPPER
        units = raw - upper
    else:
        upper = _nearest_bf16(raw)
        units = tl.minimum(tl.maximum((raw - upper + 0x80) >> 8, -127), 127)
    return upper, units


@triton.jit
def _rounded(master, uniform):
    """Return a bf16 in the upper 16 bits, rounded up or down by a uniform number."""
    raw = _bits(master)
    up = raw + (uniform * 65536.0).to(tl.int32)
    finite = (raw & MAGNITUDE) < INFINITE
    kept = tl.where(master == master, raw, QUIET_NAN)
    return tl.where(finite, up, kept) & UPPER


@triton.jit
def _first_of(code, scale):
    """Decode ``exp_avg``."""
    curve = code.to(tl.float32) * 0.007874015748031496
    least = 2.0 - tl.abs(curve)
    return _quotient(curve, least, _reciprocal(least)) * scale[:, None]


@triton.jit
def _second_of(code, scale):
    """Decode ``exp_avg_sq``."""
    root = code.to(tl.float32) * 0.00392156862745098
    return root * root * scale[:, None]


@triton.jit
def _scale_of(values):
    """Return each block's largest magnitude (NaN if the block has a NaN), and the factor that scales the block to 1."""
    largest = tl.max(_bits(values) & MAGNITUDE, 1)
    scale = _float(tl.where(largest == INFINITE, INFINITE - 1, largest))  # the greatest number
    least = tl.where(scale < TINY, TINY, scale)
    return scale, tl.div_rn(tl.full(least.shape, 1.0, tl.float32), least)


@triton.jit
def _code_of_first(values, factor):
    scaled = values * factor[:, None]
    more = 1.0 + tl.abs(scaled)
    curve = _quotient(254.0 * scaled, more, _reciprocal(more))
    return _bits(curve + ROUNDER).to(tl.int8)  # of NaN, the lower bits are 0


@triton.jit
def _code_of_second(values, factor, uniform):
    """Encode ``exp_avg_sq``, rounded stochastically.

    The device's fast root may be off by 2 units of its last place. Its whole part then differs if the square is within
    2**-21 of a code's square. The code differs only if the random number is also within 2**-20 of its end: once in some
    10**11 elements, by one.
    """
    square = tl.minimum(values * factor[:, None] * 65025.0, 65025.0)  # of NaN and the most, the most
    below = tl.floor(_fast_root(square))
    up = tl.fma(-below, below, square) > uniform * tl.fma(2.0, below, 1.0)  # both exact up to 255
    code = tl.where(up, below + 1.0, below)
    code = tl.maximum(code, tl.where(values > 0.0, 1.0, 0.0))
    return _bits(code + ROUNDER).to(tl.uint8)


@triton.jit
def _load(pointer, at, ok, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer + at, ok, 0)
    return tl.load(pointer + at)


@triton.jit
def _store(pointer, at, value, ok, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + at, value, ok)
    else:
        tl.store(pointer + at, value)


@triton.jit
def _step_rows(
    weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, correction_ptr, first_scale_ptr, second_scale_ptr,
    program, numel, first_row, flag_ptr, scale, bound,
    shrink, pull, part, keep, second, correction2, inverse2, eps, rate, seed, seed_of_weights,
    BITS: tl.constexpr, HAS_CODES: tl.constexpr, HAS_BOUND: tl.constexpr, HAS_PULL: tl.constexpr,
    IS_NEAR: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Step ``ROWS`` blocks of a piece; ``numel`` counts the elements from the first of these blocks to the end.

    ``BITS`` are the bits of the master weight: 16 without a correction; 24 or 32 with one; 32 in fp32.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * BLOCK + column[None, :]
    ok = at < numel
    ok_row = row * BLOCK < numel
    number = first_row + program * ROWS + row  # of the block in its parameter

    grad = _load(grad_ptr, at, ok, MASKED).to(tl.float32)
    largest = tl.max(_bits(grad) & MAGNITUDE, 1)
    tl.store(flag_ptr + row * 0, 1, largest >= INFINITE)
    if HAS_BOUND:
        grad = tl.clamp(grad, -bound, bound, tl.PropagateNan.ALL)
    grad = grad * scale

    stored = _load(weight_ptr, at, ok, MASKED)
    master = stored.to(tl.float32)
    if correction_ptr is not None:
        master = _join(master, _load(correction_ptr, at, ok, MASKED), BITS)
    master = master * shrink
    if HAS_PULL:
        grad = tl.where(pull != 0.0, tl.fma(pull, master, grad), grad)

    m = _load(exp_avg_ptr, at, ok, MASKED)
    v = _load(exp_avg_sq_ptr, at, ok, MASKED)
    if HAS_CODES:
        m = _first_of(m, _load(first_scale_ptr, row, ok_row, MASKED))
        v = _second_of(v, _load(second_scale_ptr, row, ok_row, MASKED))
    if IS_NEAR:  # torch's lerp starts from the nearer end
        m = tl.fma(part, grad - m, m)
    else:
        m = tl.fma(tl.where(part < 0.5, part, part - 1.0), grad - m, tl.where(part < 0.5, m, grad))
    v = tl.fma(second * grad, grad, v * keep)
    root = _quotient(_root(v), correction2, inverse2) + eps
    change = m * -rate
    quotient = _quotient(change, root, _refined(_reciprocal(root), root))
    master += tl.where(v == float("inf"), change * 0.0, quotient)

    if BITS == 16:
        upper = _rounded(master, _uniform(number, column, seed_of_weights))
        _store(weight_ptr, at, _upper_half(upper), ok, MASKED)
    elif correction_ptr is not None:
        upper, units = _split(master, BITS)
        _store(weight_ptr, at, _upper_half(upper), ok, MASKED)
        _store(correction_ptr, at, units.to(correction_ptr.dtype.element_ty), ok, MASKED)
    else:
        _store(weight_ptr, at, master, ok, MASKED)
    if HAS_CODES:
        scale_of_m, factor = _scale_of(m)
        _store(first_scale_ptr, row, scale_of_m, ok_row, MASKED)
        _store(exp_avg_ptr, at, _code_of_first(m, factor), ok, MASKED)
        scale_of_v, factor = _scale_of(v)
        _store(second_scale_ptr, row, scale_of_v, ok_row, MASKED)
        _store(exp_avg_sq_ptr, at, _code_of_second(v, factor, _uniform(number, column, seed)), ok, MASKED)
    else:
        _store(exp_avg_ptr, at, m, ok, MASKED)
        _store(exp_avg_sq_ptr, at, v, ok, MASKED)


@triton.jit
def _step_program(
    weight, grad, exp_avg, exp_avg_sq, correction, first_scale, second_scale,
    program, numel, first_row, flag, scale, bound,
    shrink, pull, part, keep, second, correction2, inverse2, eps, rate, seed, seed_of_weights,
    BITS: tl.constexpr, HAS_CODES: tl.constexpr, HAS_BOUND: tl.constexpr, HAS_PULL: tl.constexpr,
    IS_NEAR: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Step the blocks of one program; only the last program of a piece needs masks."""
    start = program.to(tl.int64) * (ROWS * BLOCK)
    weight += start
    grad += start
    exp_avg += start
    exp_avg_sq += start
    if correction is not None:
        correction += start
    if HAS_CODES:
        first_scale += program.to(tl.int64) * ROWS
        second_scale += program.to(tl.int64) * ROWS
    left = tl.minimum(numel - start, ROWS * BLOCK).to(tl.int32)
    if IS_WHOLE:
        _step_rows(
            weight, grad, exp_avg, exp_avg_sq, correction, first_scale, second_scale,
            program, left, first_row, flag, scale, bound,
            shrink, pull, part, keep, second, correction2, inverse2, eps, rate, seed, seed_of_weights,
            BITS, HAS_CODES, HAS_BOUND, HAS_PULL, IS_NEAR, False, ROWS,
        )  # fmt: skip
    elif left == ROWS * BLOCK:
        _step_rows(
            weight, grad, exp_avg, exp_avg_sq, correction, first_scale, second_scale,
            program, left, first_row, flag, scale, bound,
            shrink, pull, part, keep, second, correction2, inverse2, eps, rate, seed, seed_of_weights,
            BITS, HAS_CODES, HAS_BOUND, HAS_PULL, IS_NEAR, False, ROWS,
        )  # fmt: skip
    else:
        _step_rows(
            weight, grad, exp_avg, exp_avg_sq, correction, first_scale, second_scale,
            program, left, first_row, flag, scale, bound,
            shrink, pull, part, keep, second, correction2, inverse2, eps, rate, seed, seed_of_weights,
            BITS, HAS_CODES, HAS_BOUND, HAS_PULL, IS_NEAR, True, ROWS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["numel", "first_row", "index", "seed", "seed_of_weights"])
def step_one(
    weight, grad, exp_avg, exp_avg_sq, correction, first_scale, second_scale, scale_ptr, not_finite,
    numel, first_row, index, seed, seed_of_weights,
    bound, shrink, pull, part, keep, second, correction2, inverse2, eps, rate,
    BITS: tl.constexpr, HAS_CODES: tl.constexpr, HAS_BOUND: tl.constexpr, HAS_PULL: tl.constexpr,
    IS_NEAR: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Step a piece."""
    scale = tl.load(scale_ptr)
    if scale == scale:  # NaN: nothing is stepped
        _step_program(
            weight, grad, exp_avg, exp_avg_sq, correction, first_scale, second_scale,
            tl.program_id(0), numel, first_row, not_finite + index, scale, bound,
            shrink, pull, part, keep, second, correction2, inverse2, eps, rate, seed, seed_of_weights,
            BITS, HAS_CODES, HAS_BOUND, HAS_PULL, IS_NEAR, IS_WHOLE, ROWS,
        )  # fmt: skip


@triton.jit
def _address(entry, column, TYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return the pointer in a column of the table, as a pointer to elements of ``TYPE``."""
    pointer = tl.load(entry + column).to(tl.pointer_type(TYPE))
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _number(entry, column):
    """Return the fp32 number in a column of the table."""
    return _float(tl.load(entry + column).to(tl.int32))


@triton.jit
def step_many(
    table, owners, scale_ptr, not_finite, bound,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, CORRECTION: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BITS: tl.constexpr, HAS_CODES: tl.constexpr, HAS_BOUND: tl.constexpr, HAS_PULL: tl.constexpr,
    IS_NEAR: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Step many pieces of one layout; ``owners`` maps each program to its piece."""
    scale = tl.load(scale_ptr)
    if scale == scale:
        entry = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * COLUMNS
        weight = _address(entry, 0, WEIGHT, IS_ALIGNED)
        grad = _address(entry, 1, GRAD, IS_ALIGNED)
        exp_avg = _address(entry, 2, FIRST, IS_ALIGNED)
        exp_avg_sq = _address(entry, 3, SECOND, IS_ALIGNED)
        correction = None
        if CORRECTION is not None:
            correction = _address(entry, 4, CORRECTION, IS_ALIGNED)
        first_scale = None
        second_scale = None
        if HAS_CODES:
            first_scale = _address(entry, 5, tl.float32, IS_ALIGNED)
            second_scale = _address(entry, 6, tl.float32, IS_ALIGNED)
        _step_program(
            weight, grad, exp_avg, exp_avg_sq, correction, first_scale, second_scale,
            tl.program_id(0) - tl.load(entry + 7).to(tl.int32), tl.load(entry + 8), tl.load(entry + 9).to(tl.int32),
            not_finite + tl.load(entry + 10), scale, bound,
            _number(entry, 11), _number(entry, 12), _number(entry, 13), _number(entry, 14), _number(entry, 15),
            _number(entry, 16), _number(entry, 17), _number(entry, 18), _number(entry, 19),
            tl.load(entry + 20).to(tl.int32), tl.load(entry + 21).to(tl.int32),
            BITS, HAS_CODES, HAS_BOUND, HAS_PULL, IS_NEAR, IS_WHOLE, ROWS,
        )  # fmt: skip


@triton.jit
def _narrowed(value, TYPE: tl.constexpr):
    """Convert fp32 numbers to another floating type, rounded to the nearest value."""
    if tl.bfloat16 == TYPE:
        return _upper_half(_nearest_bf16(tl.where(value == value, _bits(value), QUIET_NAN)))
    return value.to(TYPE)


@triton.jit
def _add_part(
    gradient, total, at, ok, is_first, bound,
    HAS_TOTAL: tl.constexpr, HAS_BOUND: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add elements of a gradient to a total, and return the squares of the sums; NaN where a sum isn't finite."""
    value = _load(gradient, at, ok, MASKED)
    if HAS_TOTAL:
        value = value.to(tl.float32)
        if is_first == 0:
            value = _load(total, at, ok, MASKED).to(tl.float32) + value
        value = _narrowed(value, total.dtype.element_ty)
        _store(total, at, value, ok, MASKED)
    value = value.to(tl.float32)
    wrong = value - value
    if HAS_BOUND:
        value = tl.clamp(value, -bound, bound)
    return value * value + wrong


@triton.jit
def _add_program(
    gradient, total, partials, program, numel, is_first, bound,
    HAS_TOTAL: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BOUND: tl.constexpr,
):  # fmt: skip
    """Add ``PER_PARTIAL`` elements of a gradient to a total, and store the norm of the sums."""
    start = program.to(tl.int64) * PER_PARTIAL
    left = tl.minimum(numel - start, PER_PARTIAL).to(tl.int32)
    gradient += start
    if HAS_TOTAL:
        total += start
    squares = tl.zeros((PER_SUM,), tl.float32)
    whole = left // PER_SUM * PER_SUM
    for first in range(0, whole, PER_SUM):
        at = first + tl.arange(0, PER_SUM)
        squares += _add_part(gradient, total, at, at >= 0, is_first, bound, HAS_TOTAL, HAS_BOUND, False)
    if whole < left:
        at = whole + tl.arange(0, PER_SUM)
        squares += _add_part(gradient, total, at, at < left, is_first, bound, HAS_TOTAL, HAS_BOUND, True)
    if HAS_NORM:
        tl.store(partials + program, tl.sqrt_rn(tl.sum(squares, 0)))


@triton.jit(do_not_specialize=["numel", "is_first"])
def add_one(
    gradient, total, partials, numel, is_first, bound,
    HAS_TOTAL: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BOUND: tl.constexpr,
):  # fmt: skip
    """Add a gradient to a total."""
    _add_program(gradient, total, partials, tl.program_id(0), numel, is_first, bound, HAS_TOTAL, HAS_NORM, HAS_BOUND)


@triton.jit
def add_many(
    table, owners, bound,
    GRADIENT: tl.constexpr, TOTAL: tl.constexpr, IS_ALIGNED: tl.constexpr,
    HAS_TOTAL: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BOUND: tl.constexpr,
):  # fmt: skip
    """Add many gradients to totals; ``owners`` maps each program to its gradient."""
    entry = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * SUM_COLUMNS
    total = None
    if HAS_TOTAL:
        total = _address(entry, 1, TOTAL, IS_ALIGNED)
    _add_program(
        _address(entry, 0, GRADIENT, IS_ALIGNED), total, _address(entry, 2, tl.float32, False),
        tl.program_id(0) - tl.load(entry + 3).to(tl.int32), tl.load(entry + 4), tl.load(entry + 5).to(tl.int32),
        bound, HAS_TOTAL, HAS_NORM, HAS_BOUND,
    )  # fmt: skip
