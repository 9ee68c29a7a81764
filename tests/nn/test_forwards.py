"""A replaced forward: what stays, copies and pickles, and how it is restored; by each of its users."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.nn.deferred_logits import DeferredLogits, Use, defer_logits
from lightning_solo.nn.forwards import record_of, replace_forward, restore_forwards
from lightning_solo.nn.fused_kernels import Fused, LayerNorm, fuse_layers
from lightning_solo.nn.low_precision import Product, multiply_in_low_precision, product
from lightning_solo.nn.recomputation import Wrap, checkpoint_blocks
from lightning_solo.nn.tiling import Tiling, tile_parts
from tests.modules import Block
from tests.training import equal

WIDTH = 32
USERS: dict[type, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    Wrap: (lambda: Block(WIDTH), lambda block: checkpoint_blocks({"block": block})),
    Tiling: (lambda: Block(WIDTH), lambda part: tile_parts({"part": part}, 4)),
    Product: (
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda layer: multiply_in_low_precision([layer], product("int8", torch.device("cpu"))),
    ),
    Use: (lambda: nn.Linear(WIDTH, WIDTH), lambda head: defer_logits(head, 4)),
    Fused: (
        lambda: nn.LayerNorm(WIDTH),
        lambda layer: fuse_layers({"norm": layer}, {"norm": LayerNorm("weight", "bias", 1e-5)}, "operators"),
    ),
}
each_user = pytest.mark.parametrize("kind", USERS, ids=lambda kind: kind.__name__)


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    module(x).sum().backward()
    result = [p.grad for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return result


@each_user
def test_a_module_is_unchanged_but_for_its_forward_until_that_is_restored(kind: type) -> None:
    make, replace = USERS[kind]
    module = make()
    called: list[object] = []
    module.register_forward_hook(lambda *_: called.append(None))
    plain, names = vars(module).copy(), list(module.state_dict())
    replace(module)
    assert (type(module), list(module.state_dict())) == (type(make()), names)
    assert {name: value for name, value in vars(module).items() if name in plain} == plain
    assert "forward" in vars(module)
    assert record_of(module, kind) is not None
    module(torch.randn(8, WIDTH)).sum().backward()
    assert len(called) == 1
    for _ in range(2):  # a second time: nothing
        restore_forwards([module], kind)
        assert vars(module) == plain
        assert record_of(module, kind) is None


@each_user
def test_a_copy_acts_by_its_own_weights_and_record_and_a_pickle_is_plain(kind: type) -> None:
    make, replace = USERS[kind]
    module, x = make(), torch.randn(8, WIDTH)
    expected = gradients(module, x)
    replace(module)
    copied, pickled = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    assert copied.forward.__self__ is copied
    assert copied.forward.__func__ is module.forward.__func__
    assert record_of(copied, kind) is not None
    restore_forwards([copied], kind)
    assert "forward" in vars(module)
    for plain in (copied, pickled):
        assert not isinstance(plain(x), DeferredLogits)
        assert equal(gradients(plain, x), expected)


def tripled(module: nn.Module, x: Tensor) -> Tensor:
    return 3 * type(module).forward(module, x)


@each_user
def test_a_forward_that_was_set_since_stays(kind: type) -> None:
    make, replace = USERS[kind]
    module, x = make(), torch.randn(8, WIDTH)
    expected = 3 * module(x)
    replace(module)
    module.forward = later = tripled.__get__(module)
    restore_forwards([module], kind)
    assert module.forward is later
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("kind", [Wrap, Tiling], ids=lambda kind: kind.__name__)
def test_a_forward_that_was_set_before_is_called_and_restored(kind: type) -> None:
    make, replace = USERS[kind]
    module, x = make(), torch.randn(8, WIDTH)
    module.forward = own = tripled.__get__(module)
    expected = gradients(module, x)
    replace(module)
    torch.testing.assert_close(gradients(module, x), expected)
    restore_forwards([module], kind)
    assert module.forward is own


@pytest.mark.parametrize("order", [(Wrap, Tiling), (Tiling, Wrap)])
def test_two_replacements_of_one_module_act_together(order: tuple[type, type]) -> None:
    module, x = Block(WIDTH), torch.randn(8, WIDTH)
    plain, expected = vars(module).copy(), gradients(module, x)
    for kind in order:
        USERS[kind][1](module)
    torch.testing.assert_close(gradients(module, x), expected)
    wrap, tiling = record_of(module, Wrap), record_of(module, Tiling)
    assert wrap is not None
    assert wrap.recomputed
    assert tiling is not None
    assert tiling.most_tokens == 8
    for kind in reversed(order):
        restore_forwards([module], kind)
    assert vars(module) == plain


def test_the_function_is_called_with_the_module_and_its_arguments() -> None:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return record_of(module, list), args, kwargs

    layer = nn.ReLU()
    replace_forward(layer, forward, record := [1])
    assert layer(2, inplace=3) == ([1], (2,), {"inplace": 3})
    assert record_of(layer, list) is record
    assert record_of(layer, dict) is None
