"""Modules without data are those with data: same names, shapes, types and ties; and nothing stays patched."""

from __future__ import annotations

import contextlib
import copy
import itertools
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

pytest.importorskip("transformers")
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import import_utils

from lightning_solo.planner.data_dependent_ops import arrays_of_zeros
from lightning_solo.planner.fake_modules import (
    KNOWN,
    copied_by_clone,
    empty_parameters,
    fake_mode,
    inspected_masks,
    known_numbers,
    replaced_by_apply,
    stripped,
    to_fake,
    with_numbers,
)
from lightning_solo.planner.forks import run_in_forks
from lightning_solo.planner.tracer import Tracer
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.units import MiB
from tests.planner.modules import tied


class Handed(nn.Module):
    """One parameter, made before any module has it, under two names; one that is frozen, with a mark of its own."""

    def __init__(self) -> None:
        super().__init__()
        both = nn.Parameter(torch.ones(3, 5))
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)
        self.first.weight = self.second.weight = both
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)
        self.frozen.mark = "kept"  # type: ignore[attr-defined]
        self.register_buffer("mean", torch.arange(4.0))


def byte_gpt() -> nn.Module:
    return ByteGPT(width=16, depth=2, heads=2, context=8)


def gpt_2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=8, vocab_size=32))


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "byte_gpt": byte_gpt,
    "gpt_2": gpt_2,
    "tied": tied,
    "handed": Handed,
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def described(module: nn.Module) -> list[tuple[str, torch.Size, tuple[int, ...], torch.dtype, bool]]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [(name, t.shape, t.stride(), t.dtype, t.requires_grad) for name, t in named]


def ties(module: nn.Module) -> list[int]:
    """Return for each name of a parameter the index of the first name with the same one."""
    ids = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
    return [ids.index(each) for each in ids]


def empty(make: Callable[[], nn.Module]) -> nn.Module:
    with empty_parameters():
        return make()


# --- built without data ---


@makers
def test_module_without_data_has_the_same_tensors(make: Callable[[], nn.Module]) -> None:
    real, module = make(), empty(make)
    assert described(module) == described(real)
    assert ties(module) == ties(real)
    assert all(p.is_meta for p in module.parameters())
    assert not any(b.is_meta for b in module.buffers()), "what else a constructor computes is computed"
    assert [type(p) for p in module.parameters()] == [type(p) for p in real.parameters()]


def test_attributes_of_a_parameter_are_kept() -> None:
    assert empty(Handed).frozen.mark == "kept"  # type: ignore[union-attr]


def test_shapes_computed_from_numbers_are_right() -> None:
    def make() -> nn.Module:
        widths = [int(width.item()) for width in torch.linspace(8, 24, 3)]
        return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(widths)])

    assert [p.shape[0] for p in empty(make).parameters() if p.dim() == 2] == [16, 24]


def test_a_module_of_seven_billion_takes_no_memory() -> None:
    def resident() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the most since the process began

    def build() -> tuple[int, int]:
        before = resident()
        module = empty(lambda: ByteGPT(width=4096, depth=34, heads=32, context=2048))
        return sum(p.numel() for p in module.parameters()), resident() - before

    _, (parameters, more) = run_in_forks(lambda: None, build)  # in a process of its own, whose peak is its own
    # 12 x 4096**2 in each of 34 layers, and biases, norms and embeddings
    assert 6.8e9 < parameters < 6.9e9
    assert more < 100 * MiB


# --- made of a module that is there ---


@makers
def test_a_module_is_stripped_without_being_touched(make: Callable[[], nn.Module]) -> None:
    module = make()
    objects = [*module.parameters(), *module.buffers()]
    before = copy.deepcopy(module.state_dict())
    bare = stripped(module)
    assert all(a is b for a, b in zip(objects, [*module.parameters(), *module.buffers()], strict=True))
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in before.items())
    assert all(t.is_meta for t in [*bare.parameters(), *bare.buffers()])
    assert described(bare) == described(module)
    assert ties(bare) == ties(module)
    assert not {id(t) for t in objects} & {id(t) for t in [*bare.parameters(), *bare.buffers()]}


@makers
def test_to_fake_keeps_metadata(make: Callable[[], nn.Module]) -> None:
    real = make()
    for module in (empty(make), stripped(make())):
        to_fake(module, fake_mode())
        assert described(module) == described(real)
        assert ties(module) == ties(real)
        tensors = [*module.parameters(), *module.buffers()]
        assert all(isinstance(t, FakeTensor) and t.device.type == "cpu" for t in tensors)
        assert all(isinstance(p, nn.Parameter) for p in module.parameters())


@makers
def test_another_precision_keeps_ties(make: Callable[[], nn.Module]) -> None:
    module = empty(make)
    mode = fake_mode()
    to_fake(module, mode)
    with mode, replaced_by_apply():
        module.to(torch.bfloat16)
    assert ties(module) == ties(make())
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in make().parameters()]


def test_a_deep_copy_on_fake_tensors_keeps_ties_and_the_mode() -> None:
    module = empty(tied)
    mode = fake_mode()
    to_fake(module, mode)
    with mode, copied_by_clone():
        copied = copy.deepcopy(module)
        result = copied.network(torch.ones(2, 16))
    assert ties(copied) == ties(module)
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in module.parameters()}
    assert all(isinstance(p, nn.Parameter) and p.fake_mode is mode for p in copied.parameters())  # type: ignore[attr-defined]
    assert result.fake_mode is mode


# --- nothing stays patched ---


def patched() -> Iterator[tuple[str, AbstractContextManager[None], Callable[[], object]]]:
    """Yield what is patched, by whom, and how it is read."""
    yield "register_parameter", empty_parameters(), lambda: nn.Module.register_parameter
    names = sorted(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_"))
    yield "init", empty_parameters(), lambda: [getattr(nn.init, name) for name in names]
    yield "_apply", replaced_by_apply(), lambda: nn.Module._apply
    yield "deepcopy", copied_by_clone(), lambda: FakeTensor.__deepcopy__
    yield "known_numbers", known_numbers(), lambda: fake_tensor.CONSTANT_NUMEL_LIMIT
    yield "inspected_masks", inspected_masks(), lambda: import_utils.is_fake_tensor
    yield "numpy", arrays_of_zeros(lambda what: None), lambda: (torch.Tensor.numpy, FakeTensor.tolist)


@pytest.mark.parametrize(("manager", "read"), [pytest.param(m, r, id=name) for name, m, r in patched()])
def test_patches_end_after_an_exception(manager: AbstractContextManager[None], read: Callable[[], object]) -> None:
    before = read()
    with contextlib.suppress(ZeroDivisionError), manager:
        assert read() != before, "patched meanwhile"
        raise ZeroDivisionError
    assert read() == before


def test_real_tensors_keep_their_numbers() -> None:
    told: list[str] = []
    with fake_mode():
        fake = torch.ones(2, 3)
    with arrays_of_zeros(told.append):
        assert torch.arange(3).tolist() == [0, 1, 2]
        assert torch.arange(3).numpy().tolist() == [0, 1, 2]
        assert not told
        assert fake.numpy().shape == (2, 3)
        assert fake.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert told == [".numpy() and .tolist() return zeros"] * 2


def test_known_numbers_are_kept() -> None:
    told: list[str] = []
    mode = fake_mode()
    with arrays_of_zeros(told.append), known_numbers():
        of_the_batch = with_numbers(mode, torch.tensor([8, 16]))
        with mode:
            widths = of_the_batch.clone()
            assert torch.tensor([8, 16]).tolist() == [8, 16]
        assert widths.tolist() == widths.numpy().tolist() == [8, 16]
        assert (widths + 1).tolist() == [9, 17]
    assert not told
    assert with_numbers(mode, torch.empty(KNOWN + 1, dtype=torch.uint8)).constant is None  # type: ignore[attr-defined]


def test_short_range_has_numbers() -> None:
    tracer = Tracer(nn.Linear(2, 2))
    with known_numbers(), fake_mode(), tracer:
        positions = torch.arange(3, 7)[None]
        assert bool((torch.diff(positions) == 1).all())  # as transformers asks before it builds a mask
        assert not tracer.assumptions
        assert torch.arange(KNOWN + 1).constant is None  # type: ignore[attr-defined]
        assert torch.arange(3.0).constant is None  # type: ignore[attr-defined]
    assert tracer.assumptions == {}


def test_large_result_of_known_numbers_is_not_computed() -> None:
    tracer = Tracer(nn.Linear(2, 2))
    with known_numbers(), fake_mode(), tracer:
        positions = torch.arange(2**20)
        mask = positions[None] <= positions[:, None]  # a terabyte
        assert mask.constant is None  # type: ignore[attr-defined]
        assert positions[-1].item() == 2**20 - 1
    assert tracer.assumptions == {}
