"""Factors are rounded as the formats' definitions say, products keep within their bounds, and infs aren't lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_solo.nn import rounded_products as rounded
from lightning_solo.planner.tracer import Tracer

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
PRODUCTS: dict[str, tuple[rounded.Multiply, float]] = {  # largest error of a product, of |left| @ |right|
    "mxfp8": (rounded.mxfp8_product, 2 * 2**-4 + 2**-8),
    "nvfp4": (rounded.nvfp4_product, 0.75),  # each factor within a quarter, or the half step of its block's smallest
    "int8": (rounded.int8_product, 0.2),
    "fp16_accumulate": (rounded.fp16_product, 8 * 2**-10),
}
every_product = pytest.mark.parametrize("kind", PRODUCTS)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


# --- numbers and scales ---


def test_mxfp8_scales_are_the_least_powers_of_two_that_hold_a_block() -> None:
    factor = torch.zeros(4, 64)
    factor[:, 0] = torch.tensor([448.0, 449.0, 1.0, 0.0])
    numbers, scale = rounded.to_mxfp8(factor)
    assert scale[:, 0].tolist() == [1.0, 2.0, 2.0**-8, 2.0**-126]
    assert torch.equal(scale[:, 1], torch.full((4,), 2.0**-126))  # blocks of zeros
    assert numbers[:, 0].tolist() == [448.0, 224.0, 256.0, 0.0]  # 224.5 in steps of 16
    assert rounded._e8m0(scale).float()[2, 0] == 2.0**-8


@pytest.mark.parametrize("shift", [-40, 0, 40])
def test_mxfp8_leaves_its_own_numbers_and_powers_of_two_alone(shift: int) -> None:
    factor = (normal(32, 64).clamp(-2, 2).to(torch.float8_e4m3fn).float() * 2.0**shift).repeat(1, 2)
    factor[:, 0] = 2.0 ** (shift + 2)
    numbers, scale = rounded.to_mxfp8(factor)
    assert (rounded._unscaled(numbers, scale) - factor).abs().max() <= 2.0 ** (shift + 2 - 6 - 8)  # subnormal numbers
    powers = 2.0 ** torch.randint(shift - 7, shift + 8, (32, 64)).float()
    assert torch.equal(rounded._unscaled(*rounded.to_mxfp8(powers)), powers)


def test_mxfp8_is_as_torchao_rounds_it() -> None:
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    factor = normal(48, 96) * 2.0 ** torch.randint(-20, 20, (48, 1)).float()
    scale, numbers = mx_tensor.to_mx(factor, torch.float8_e4m3fn, 32, config.ScaleCalculationMode.RCEIL)
    ours = rounded.to_mxfp8(factor)
    assert torch.equal(ours[0], numbers.float())
    assert torch.equal(rounded._e8m0(ours[1]).view(torch.uint8), scale.view(torch.uint8))


def test_nvfp4_is_as_torchao_rounds_it() -> None:
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    factor = normal(48, 96) * 2.0 ** torch.randint(-8, 8, (48, 1)).float()
    of_all = nvfp4.per_tensor_amax_to_scale(factor.abs().max())
    scale, packed = nvfp4.nvfp4_quantize(factor, 16, of_all)
    numbers, our_scale, our_scale_of_all = rounded.to_nvfp4(factor)
    assert torch.equal(our_scale_of_all, of_all)
    assert torch.equal(our_scale, scale.float())
    same = rounded.packed_e2m1(numbers).view(torch.uint8) == packed
    assert same.float().mean() > 0.999  # it divides in two roundings, so that a few ties fall to the other side


def test_e2m1_is_rounded_to_the_nearest_and_packed_in_pairs() -> None:
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0]])
    assert rounded._to_e2m1(ties, stochastic=False).tolist() == [[0, 1, 1, 2, 2, 4, 4, 6]]  # to even codes
    codes = rounded.packed_e2m1(torch.stack([E2M1, -E2M1], 1).reshape(1, -1)).view(torch.uint8)
    assert codes.tolist() == [[code | (code | 8) << 4 for code in range(8)]]


def test_a_draw_of_almost_one_rounds_to_no_number_beyond_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, 1 - 2**-24))
    assert rounded._to_e2m1(torch.full((2, 16), 6.0), stochastic=True).unique().tolist() == [6.0]


def test_stochastic_rounding_is_right_on_average() -> None:
    torch.manual_seed(0)
    number = torch.tensor([0.1, -0.6, 1.3, 2.2, -3.9, 5.5])
    draws = rounded._to_e2m1(number.expand(20_000, -1), stochastic=True)
    assert set(draws.abs().unique().tolist()) <= set(E2M1.tolist())
    step = torch.tensor([0.5, 0.5, 0.5, 1, 1, 2])
    assert ((draws.mean(0) - number).abs() < 4 * step / 2 / 20_000**0.5).all()  # four standard errors at most
    assert (draws - number).abs().max() < 2


def test_a_hadamard_transform_leaves_products_alone_and_spreads_an_outlier() -> None:
    left, right = normal(32, 64), normal(48, 64, seed=1)
    left[0] = 0
    left[0, 20] = 16.0
    a, b = rounded.hadamard(left, right)
    torch.testing.assert_close(a @ b.t(), left @ right.t())
    assert a[0, 16:32].abs().tolist() == [4.0] * 16  # 16 / sqrt(16)
    assert a[0, :16].abs().max() == 0


def test_scales_are_in_tiles_of_128_by_4() -> None:
    scales = torch.arange(200 * 6).reshape(200, 6).remainder(251).to(torch.uint8)
    tiles = rounded.in_tiles(scales)
    assert tiles.numel() == 2 * 2 * 512
    for row, column in ((0, 0), (33, 2), (199, 5), (127, 3)):
        tile, within = row // 128 * 2 + column // 4, row % 128
        assert tiles[tile * 512 + within % 32 * 16 + within // 32 * 4 + column % 4] == scales[row, column]
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    assert torch.equal(tiles, utils.to_blocked(scales))


# --- products ---


@every_product
def test_a_product_and_its_gradients_are_within_the_bound(kind: str) -> None:
    multiply, bound = PRODUCTS[kind]
    rows, weight, gradient = normal(64, 96), normal(32, 96, seed=1), normal(64, 32, seed=2)
    rows.requires_grad_()
    weight.requires_grad_()
    output = rounded.RoundedProduct.apply(rows, weight, multiply, multiply, multiply)
    output.backward(gradient)
    for result, left, right in (
        (output, rows, weight.t()),
        (rows.grad, gradient, weight),
        (weight.grad, gradient.t(), rows),
    ):
        a, b = left.detach().double(), right.detach().double()
        assert result.dtype is torch.float32
        assert ((result - a @ b).abs() <= bound * (a.abs() @ b.abs()) + 1e-6).all()
        assert not torch.equal(result.double(), a @ b)


@every_product
def test_zeros_multiply_to_zeros(kind: str) -> None:
    multiply, _ = PRODUCTS[kind]
    assert torch.equal(multiply(torch.zeros(32, 64), normal(48, 64)), torch.zeros(32, 48))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4", "fp16_accumulate"])
def test_infs_and_nans_are_not_lost(kind: str, bad: float) -> None:
    multiply, _ = PRODUCTS[kind]
    left = normal(32, 64)
    left[3, 5] = bad
    assert not multiply(left, normal(48, 64))[3].isfinite().any()
    assert not multiply(normal(48, 64), left)[:, 3].isfinite().any()


def test_a_nvfp4_weight_gradient_is_right_on_average() -> None:
    torch.manual_seed(0)
    *_, weight_gradient = rounded.nvfp4_products(on_device=False)
    gradient, rows = normal(32, 64), normal(48, 64, seed=1)
    results = torch.stack([weight_gradient(gradient, rows) for _ in range(200)])
    turned, rows_turned = rounded.hadamard(gradient, rows)
    numbers, scale, scale_of_all = rounded.to_nvfp4(rows_turned)
    expected = turned @ rounded._unscaled(numbers, scale * scale_of_all).t()  # only the gradient is rounded by chance
    assert not torch.equal(results[0], results[1])
    assert (results.mean(0) - expected).norm() < 0.3 * (results[0] - expected).norm()


# --- fp16 ---


def test_sums_in_fp16_are_rounded_after_each_16_products() -> None:
    ones = torch.ones(1, 4096, dtype=torch.float16)
    assert rounded.fp16_accumulated(ones, ones.t()).item() == 4096
    left = torch.zeros(1, 48, dtype=torch.float16)
    left[0, 0] = 2048  # its neighbour is 2050
    left[0, 16] = left[0, 32] = 1
    assert rounded.fp16_accumulated(left, torch.ones(48, 1).half()).item() == 2048
    left[0, 17], left[0, 32] = 1, 0
    assert rounded.fp16_accumulated(left, torch.ones(48, 1).half()).item() == 2050


def test_no_sum_overflows_fp16() -> None:
    left = torch.full((32, 65536), 6e4)
    product = rounded.fp16_product(left, left[:16])
    assert product.isfinite().all()
    assert (product > 0.1 * 65536 * 3.6e9).all()  # 16 products of 0.25 or more vanish beside a sum of 2 ** 14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_of_sums_in_fp16_are_rounded_once(dtype: torch.dtype) -> None:
    spread = 2.0 ** torch.arange(-16, 16).float().unsqueeze(1)
    left, right = normal(32, 64).mul(spread), normal(32, 64, seed=1).mul(1 / spread)
    exact = rounded.fp16_product(left, right)
    assert not torch.equal(exact.to(dtype).float(), exact)
    assert torch.equal(rounded.fp16_product(left, right, dtype), exact.to(dtype))


def test_each_pass_of_rounding_for_sums_in_fp16_reads_and_writes_16_bits() -> None:
    tracer = Tracer(nn.Linear(1, 1), fake=False)
    left, right = normal(256, 512).bfloat16(), normal(128, 512, seed=1).bfloat16()
    with tracer:
        rounded.fp16_product(left, right, torch.bfloat16)
    passes = sum(cost.bytes for cost in tracer.costs if not cost.flops)
    # factors: read for their largest numbers, read, written in fp16; the result: read and written once for each scale
    assert passes == pytest.approx(3 * (left.nbytes + right.nbytes) + 4 * 2 * 256 * 128, rel=0.1)


def test_transposed_factors_of_sums_in_fp16_are_compiled_without_a_break() -> None:
    left, right = normal(64, 32).t(), normal(64, 48, seed=1).t()
    compiled = torch.compile(rounded.fp16_product, backend="eager", fullgraph=True)
    assert torch.equal(compiled(left, right), rounded.fp16_product(left, right))


def test_the_switch_is_on_for_the_product_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    switches, seen = torch.backends.cuda.matmul, list[bool]()

    class OnDevice:
        is_cuda = True

        def __matmul__(self, other: object) -> object:
            seen.append(switches.allow_fp16_accumulation)
            if other is None:
                raise RuntimeError
            return self

    multiply: Callable[..., object] = rounded.fp16_accumulated._init_fn
    multiply(OnDevice(), OnDevice())
    with pytest.raises(RuntimeError):
        multiply(OnDevice(), None)
    assert seen == [True, True]
    assert not switches.allow_fp16_accumulation


# --- on a device ---


@pytest.mark.parametrize(
    "multiply",
    [partial(rounded.mxfp8_product, on_device=True), *rounded.nvfp4_products(on_device=True)],
    ids=["mxfp8", "nvfp4 output", "nvfp4 gradient", "nvfp4 weight gradient"],
)
def test_torch_takes_the_factors_and_scales_of_a_device(multiply: rounded.Multiply) -> None:
    with FakeTensorMode():
        left, right = (torch.empty(rows, 96, device="cuda") for rows in (64, 160))
        result = multiply(left, right, torch.bfloat16)
    assert (result.shape, result.dtype, result.device.type) == ((64, 160), torch.bfloat16, "cuda")
