"""A cached operator's result is what torch gives, and no result is taken from a call that differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_solo.planner.fake_modules import fake_mode, known_numbers, with_numbers
from lightning_solo.planner.operator_cache import OperatorCache

aten = torch.ops.aten
MODE = fake_mode()


class Counted:
    """A cache, the number of operators that ran, and how often each of them did."""

    def __init__(self) -> None:
        self.ran = 0
        self._cache = OperatorCache(self._run)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        self.ran += 1
        with MODE:
            return func(*args, **kwargs), self.ran

    def __call__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self._cache(func, args, kwargs)[0]


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with MODE:
        return torch.empty(shape, dtype=dtype)


def metadata(result: Any) -> Any:
    if not isinstance(result, Tensor):
        return [metadata(each) for each in result] if isinstance(result, (list, tuple)) else result
    keys = torch._C._dispatch_keys(result).raw_repr()
    layout = (result.shape, result.stride(), result.storage_offset(), result.untyped_storage().nbytes())
    return type(result), layout, result.dtype, result.device, result.requires_grad, keys


CALLS: dict[str, Any] = {
    "new": lambda: (aten.mm.default, fake(4, 3), fake(3, 5)),
    "transposed": lambda: (aten.add.Tensor, fake(4, 3).t(), 1),
    "view": lambda: (aten.slice.Tensor, fake(4, 3), 0, 1, 3),
    "views": lambda: (aten.split.Tensor, fake(4, 3), 2),
    "view of another type": lambda: (aten.view.dtype, fake(4, 3), torch.int16),
    "numbers among tensors": lambda: (
        aten._scaled_dot_product_flash_attention.default,
        *[fake(2, 3, 5, 8, dtype=torch.bfloat16)] * 3,
    ),
    "unsafe view": lambda: (aten._unsafe_view.default, fake(4, 3), [12]),
    "in place": lambda: (aten.add_.Tensor, fake(4, 3), 2.0),
    "tuple": lambda: (aten.native_layer_norm.default, fake(4, 3), [3], fake(3), fake(3), 1e-5),
    "partly none": lambda: (
        aten.convolution_backward.default,
        *(fake(2, 4, 5, 5), fake(2, 3, 5, 5), fake(4, 3, 1, 1), None, [1, 1], [0, 0], [1, 1]),
        *(False, [0, 0], 1, [False, True, False]),
    ),
    "list": lambda: (aten._foreach_sqrt.default, [fake(4), fake(5, 2)]),
    "nothing": lambda: (aten._foreach_add_.Scalar, [fake(4), fake(5, 2)], 1.0),
    "another type": lambda: (aten._to_copy.default, fake(4, 3, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", CALLS)
def test_second_call_is_cached_and_equals_torchs(name: str) -> None:
    cache = Counted()
    kwargs = {"dtype": torch.float32} if name == "another type" else {}
    for _ in range(2):
        func, *args = CALLS[name]()
        result = cache(func, *args, **kwargs)
        with MODE:
            expected = func(*CALLS[name]()[1:], **kwargs)
        assert metadata(result) == metadata(expected)
    assert cache.ran == 1


def test_views_and_results_in_place_belong_to_the_arguments_of_their_own_call() -> None:
    cache = Counted()
    for _ in range(2):
        x, y = fake(4, 3), fake(4, 3)
        assert cache(aten.add_.Tensor, x, y) is x
        assert cache(aten.view.default, x, [12]).untyped_storage()._cdata == x.untyped_storage()._cdata
        assert cache(aten.add.Tensor, x, y).untyped_storage()._cdata != x.untyped_storage()._cdata
    assert cache.ran == 3


DIFFERENT: dict[str, Any] = {
    "sizes": lambda: [(aten.exp.default, fake(4)), (aten.exp.default, fake(5))],
    "strides": lambda: [(aten.exp.default, fake(4, 4)), (aten.exp.default, fake(4, 4).t())],
    "offset": lambda: [(aten.alias.default, fake(4)[:3]), (aten.alias.default, fake(4)[1:])],
    "type": lambda: [(aten.exp.default, fake(4)), (aten.exp.default, fake(4, dtype=torch.bfloat16))],
    "number's type": lambda: [
        (aten.add.Tensor, fake(4, dtype=torch.int64), 1),
        (aten.add.Tensor, fake(4, dtype=torch.int64), 1.0),
    ],
    "one tensor twice": lambda: [(aten.mul.Tensor, fake(4), fake(4)), (aten.mul.Tensor, *[fake(4)] * 2)],
    "grouping": lambda: [
        (aten._foreach_add.List, [fake(4)], [fake(4)]),
        (aten._foreach_add.List, [fake(4), fake(4)], [fake(4), fake(4)]),
    ],
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_calls_that_differ_are_both_run(difference: str) -> None:
    cache = Counted()
    for func, *args in DIFFERENT[difference]():
        result = cache(func, *args)
        with MODE:
            assert metadata(result) == metadata(func(*args))
    assert cache.ran == 2


def test_a_default_type_changes_results() -> None:
    cache = Counted()
    whole = [fake(4, dtype=torch.int64) for _ in range(2)]
    assert cache(aten.true_divide.Tensor, *whole).dtype == torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert cache(aten.true_divide.Tensor, *whole).dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["known numbers", "resized", "a number", "a generator", "no mode"])
def test_calls_that_depend_on_more_than_metadata_are_not_cached(name: str) -> None:
    cache = Counted()
    for _ in range(2):
        if name == "known numbers":
            with known_numbers():
                assert cache(aten.neg.default, with_numbers(MODE, torch.ones(3))).constant is not None
        elif name == "resized":
            cache(aten.resize_.default, fake(4), [8])
        elif name == "a number":
            with pytest.raises(Exception, match="_local_scalar_dense"):
                cache(aten._local_scalar_dense.default, fake(1))
        elif name == "a generator":
            assert isinstance(cache(aten.bernoulli.default, fake(4), generator=torch.Generator()), FakeTensor)
        else:
            cache(aten.full.default, [3], 1.0)
    assert cache.ran == 2


def test_a_new_tensor_is_made_once_by_each_mode() -> None:
    cache, other = Counted(), fake_mode()
    for mode in (MODE, MODE, other):
        with mode:
            assert cache(aten.full.default, [3], 1.0).shape == (3,)
    assert cache.ran == 2


def test_known_numbers_beside_unknown_ones_count_where_they_mask_or_are_changed() -> None:
    cache = Counted()
    with known_numbers():
        for _ in range(2):
            table = with_numbers(MODE, torch.ones(3))
            assert cache(aten.mul.Tensor, fake(3), table).constant is None
        assert cache.ran == 1
        for _ in range(2):
            cache(aten.where.self, with_numbers(MODE, torch.tensor([True, False, True])), fake(3), fake(3))
        assert cache.ran == 3
        for _ in range(2):
            cache(aten.add_.Tensor, table := with_numbers(MODE, torch.ones(3)), fake(3))
            assert table.constant is None
        assert cache.ran == 5


def test_operators_that_take_indices_run_once_for_all_numbers() -> None:
    cache = Counted()
    with known_numbers():
        for number in (0, 2):
            indices = with_numbers(MODE, torch.tensor([number, 1]))
            assert cache(aten.index_select.default, fake(3), 0, indices).constant is None
        assert cache.ran == 1
        for number in (0, -100):
            targets = with_numbers(MODE, torch.tensor([number, 1]))
            loss, count = cache(aten.nll_loss_forward.default, fake(2, 3), targets, None, 1, -100)
            assert (loss.shape, count.constant) == ((), None)
        assert cache.ran == 2


def test_dequantization_runs_once_for_equal_metadata() -> None:
    pytest.importorskip("bitsandbytes")
    cached = Counted()
    results = []
    for _ in range(2):
        codes, scales = fake(32, 1, dtype=torch.uint8), fake(1)
        operator = torch.ops.bitsandbytes.dequantize_4bit.default
        results.append(cached(operator, codes, scales, 64, "nf4", (64,), torch.bfloat16))
    assert cached.ran == 1
    assert metadata(results[0]) == metadata(results[1])
    assert results[0].untyped_storage()._cdata != results[1].untyped_storage()._cdata
