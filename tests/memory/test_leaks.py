"""What grows and who holds it: counted in storages, told in words."""

from __future__ import annotations

import gc
import sys
from collections import deque
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from lightning_solo.memory.census import Census, Kind, growths, saved_tensors, take_census
from lightning_solo.memory.holders import holder_of, leaks_of
from tests.messages import lines_with

OTHER = Kind("other", "Tensor", "float32", (7, 11))


@pytest.fixture(autouse=True)
def only_new_objects() -> None:
    """Leave what other tests made out of what the garbage collector goes through."""
    gc.collect()
    gc.freeze()


def test_census_counts_each_storage_once_in_its_category() -> None:
    layer = nn.Linear(13, 17)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    loss = layer(torch.ones(19, 13)).exp().sum()
    kept, views = torch.ones(7, 11), []
    views += [kept[:3], kept.t()]
    found = take_census(layer, [optimizer])
    assert found.bytes(Kind("weights", "Parameter", "float32", (17, 13))) == 4 * 17 * 13
    assert found.bytes(OTHER) == 512  # 308 bytes, and no tensor costs less than 512
    # exp saved its result, which Python sees no more
    assert found.bytes(Kind("activations", "Tensor", "float32", (19, 17))) == 4 * 19 * 17
    loss.backward()
    optimizer.step()
    found = take_census(layer, [optimizer])
    assert found.bytes(Kind("gradients", "Tensor", "float32", (17, 13))) == 4 * 17 * 13
    assert found.bytes(Kind("optimizer_states", "Tensor", "float32", (17, 13))) == 4 * 17 * 13
    assert found.bytes(Kind("activations", "Tensor", "float32", (19, 17))) == 0
    assert len(views) == 2


def test_fake_tensors_are_not_counted() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        kept = mode.from_tensor(torch.empty(7777, 3), static_shapes=False)  # as a compiler keeps for sizes that vary
    assert all("FakeTensor" not in kind.type for kind in take_census().kinds)
    assert kept.shape[1] == 3


def test_a_tensor_that_wraps_another_is_not_counted_beside_it() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        kept = distribute_tensor(torch.ones(7, 11), init_device_mesh("cpu", (1,)), [Shard(0)])
        gc.collect()  # the first use of device meshes may leave the whole tensor in a circle of references
        kinds = take_census().kinds
        assert len(kinds[OTHER]) == 1
        assert "DTensor" not in {kind.type for kind in kinds}
        assert kept.to_local().shape == (7, 11)
    finally:
        torch.distributed.destroy_process_group()


def test_a_census_holds_no_tensor() -> None:
    gc.collect()
    gc.disable()
    try:
        kept = torch.ones(7, 11)
        before = take_census()
        del kept
        assert before.bytes(OTHER) == 512
        assert take_census().bytes(OTHER) == 0
    finally:
        gc.enable()


def test_census_does_not_unpack_saved_tensors() -> None:
    unpacked: list[int] = []
    x = torch.ones(7, 11, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("packed", t), lambda p: (unpacked.append(1), p[1])[1]):
        loss = x.exp().sum()
    assert [tuple(saved.shape) for saved in saved_tensors([loss])] == [(7, 11)]
    runs: list[int] = []
    again = checkpoint(lambda h: (runs.append(1), h.exp().sum())[1], x, use_reentrant=False)
    take_census()
    assert list(saved_tensors([again])) == []
    assert (unpacked, runs) == ([], [1])
    loss.backward()
    again.backward()
    assert len(runs) == 2
    assert list(saved_tensors([loss])) == []


def censuses(*sizes: dict[int, int]) -> list[Census]:
    return [Census({OTHER: size}) for size in sizes]


def test_growth_is_steady_and_keeps_first_storages() -> None:
    leak = censuses({1: 600}, {1: 600, 2: 600}, {1: 600, 2: 600, 3: 600})
    (found,) = growths(leak, 600)
    assert (found.kind, found.count, found.bytes, found.kept) == (OTHER, 2, 1200, {2})
    assert growths(leak, 601) == []
    longer_batches = censuses({1: 600}, {2: 1200}, {3: 1800})
    assert growths(longer_batches, 600) == []
    once = censuses({1: 600}, {1: 600, 2: 600}, {1: 600, 2: 600})
    assert growths(once, 600) == []


# --- who holds it ---


class Owner:
    """Holds what it is given."""

    def __init__(self, kept: Any = None) -> None:
        self.kept = kept


def closure(kept: Any) -> Any:
    def inner() -> Any:
        return kept

    return inner


def default(tensor: torch.Tensor) -> Any:
    def inner(kept: Any = tensor) -> Any:
        return kept

    return inner


def on_a_class(tensor: torch.Tensor) -> Any:
    return type("Shared", (), {"kept": [tensor]})


def in_a_module(tensor: torch.Tensor) -> Any:
    module = ModuleType("train_script")
    module.HISTORY = {"a": tensor}  # type: ignore[attr-defined]
    return module


def buffer(tensor: torch.Tensor) -> Any:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    module[1][0].register_buffer("kept", tensor)
    return module


@pytest.mark.parametrize(
    ("hold", "words"),
    [
        (lambda t: Owner(t), ["`kept`", "Owner"]),
        (lambda t: Owner([1, t]), ["list `kept`", "Owner"]),
        (lambda t: Owner({"a": deque([(t,)])}), ["tuple", "deque", "dict `kept`", "Owner"]),
        (lambda t: Owner(partial(print, [t])), ["list in tuple `kept`", "Owner"]),
        (lambda t: closure({"a": t}), ["dict `kept`", "closure.<locals>.inner"]),
        (lambda t: closure(t), ["`kept`", "closure.<locals>.inner"]),
        (default, ["defaults", "default.<locals>.inner"]),
        (on_a_class, ["list `kept`", "class Shared"]),
        (in_a_module, ["dict `HISTORY`", "train_script"]),
        (buffer, ["dict `_buffers`", "ReLU", "1.0"]),
    ],
)  # fmt: skip
def test_holders_have_names(hold: Any, words: list[str]) -> None:
    tensor = torch.ones(7, 11)
    keeper = [hold(tensor)]
    owner = keeper[0]
    holder = holder_of(tensor, owner if isinstance(owner, nn.Module) else None, ignored={id(keeper)})
    assert lines_with(str(holder), *words)


def test_running_functions_are_no_holders() -> None:
    tensor = torch.ones(7, 11)
    held = [tensor]
    assert holder_of(tensor) is None
    assert len(held) == 1


def test_tensor_held_by_a_graph_is_named_by_its_loss() -> None:
    gc.collect()
    layer, owner = nn.Linear(13, 17), Owner([])
    looks = []
    for _ in range(3):
        owner.kept.append(layer(torch.ones(7, 13)).exp().sum())
        looks.append(take_census(layer))
    leaks = leaks_of(growths(looks, 1), 2, layer)
    assert all("list `kept`" in leak.holder for leak in leaks)
    (by_graph,) = [leak for leak in leaks if "graph" in leak.holder]
    (by_list,) = [leak for leak in leaks if "graph" not in leak.holder]
    assert (7, 17) in {growth.kind.shape for growth in by_graph.growths}
    assert () in {growth.kind.shape for growth in by_list.growths}
    assert "2 float32 (7, 17) (activations)" in str(by_graph)
    assert "2 optimizer steps" in str(by_graph)


def test_lazy_proxies_are_not_evaluated() -> None:
    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError("asked")

    proxies = [Proxy()]
    take_census()
    assert sys.getrefcount(proxies) > 0
