"""Compiled blocks share their graphs, train to the same numbers, keep fewer bytes for backward and leave no trace."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_solo.errors import CapabilityError, ConflictError, NothingToDoError
from lightning_solo.machine import cxx_compiler
from lightning_solo.nn.compilation import CountingBackend, compile_blocks, restore_compiled
from lightning_solo.nn.recomputation import PRODUCTS, Kept, checkpoint_blocks
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.activation_offloading.technique import ActivationOffloading
from lightning_solo.techniques.regional_compilation.technique import RegionalCompilation
from tests.messages import mentions
from tests.modules import Block, Stack, loader, regression

inductor = [pytest.mark.long, pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler")]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()  # which remembers for later graphs, too, which sizes have varied


def stack(blocks: int = 3, backend: str | None = None, **arguments: Any) -> Any:
    """Return a stack of equal blocks, compiled if a back end is named, and what counts its graphs."""
    torch.manual_seed(0)
    module = Stack(blocks, **arguments)
    counting = CountingBackend(backend or "aot_eager")
    if backend is not None:
        compile_blocks(dict(module.blocks.named_children()), counting)
    return module, counting


def gradients(module: nn.Module, width: int = 8) -> list[Tensor]:
    module.zero_grad()
    torch.manual_seed(3)
    module(torch.randn(4, width)).sum().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def fitted(make_trainer: Any, *callbacks: Any, module: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    module = module or regression(L)
    data = arguments.pop("data", None) or loader()
    make_trainer(L, callbacks=list(callbacks), **{"max_steps": 4, **arguments}).fit(module, data)
    return module


# --- it acted ---


def test_blocks_that_are_alike_share_their_graphs():
    counts = []
    for blocks in (3, 9):
        module, counting = stack(blocks, "aot_eager")
        gradients(module)
        counts.append(counting.graphs)
    # one of the first block, whose input needs no gradient, and one of all others
    assert counts == [2, 2]


@pytest.mark.long
@pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler")
def test_elementwise_operators_are_fused():
    calls = {}
    for backend in (None, "inductor"):
        module, _ = stack(2, backend)
        module(x := torch.randn(4, 8))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            module(x)
        calls[backend] = sum(event.count for event in profile.key_averages() if event.key == "aten::relu")
    assert calls == {None: 2, "inductor": 0}


def test_a_trainer_compiles_the_blocks_and_says_how_many(make_trainer, caplog):
    callback = RegionalCompilation(backend="aot_eager")
    module = regression(L)
    module.val_dataloader = loader
    with caplog.at_level("INFO"):
        fitted(make_trainer, callback, module=module, limit_val_batches=1, num_sanity_val_steps=1)
    assert callback.graphs == 3  # one of them in the validation before the fit
    assert "3 Block, compiled as 2 graphs" in caplog.text


# --- parity ---


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=inductor)])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_the_plain_blocks(backend, recompute):
    plain, _ = stack()
    compiled, counting = stack(3, backend)
    if recompute:
        checkpoint_blocks(dict(compiled.blocks.named_children()))
    torch.testing.assert_close(gradients(compiled), gradients(plain), rtol=1e-5, atol=1e-6)
    assert counting.graphs > 0


def test_a_fit_ends_with_the_weights_of_a_plain_one(make_trainer):
    plain = fitted(make_trainer).state_dict()
    compiled = fitted(make_trainer, RegionalCompilation(backend="aot_eager")).state_dict()
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)


# --- memory ---


def kept_by_compiled_blocks(output: Tensor) -> int:
    """Return the bytes that compiled graphs have saved for backward, weights aside."""
    saved: dict[int, int] = {}
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [below for below, _ in node.next_functions]
        if "CompiledFunction" in node.name():
            saved |= {each.data_ptr(): each.nbytes for each in node.saved_tensors if not isinstance(each, nn.Parameter)}
    return sum(saved.values())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=inductor)])
def test_recomputed_blocks_keep_their_input_alone_when_compiled_too(backend):
    def kept(keep: Kept | None = None, recompute: bool = True) -> int:
        module, _ = stack(3, backend)
        if recompute:
            checkpoint_blocks(dict(module.blocks.named_children()), verify=False, keep=keep)
        return kept_by_compiled_blocks(module(torch.randn(64, 8)))

    inputs, between = 3 * 64 * 8 * 4, 3 * 64 * 32 * 4  # in fp32; between its linear layers a block is 4 times as wide
    assert kept() == inputs
    assert kept(Kept(PRODUCTS)) == inputs + between
    assert kept(recompute=False) > inputs + between


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=inductor)])
def test_inputs_of_recomputed_blocks_are_offloaded_when_compiled_too(backend, make_trainer):
    torch.manual_seed(5)
    module = regression(L)
    plain = copy.deepcopy(module)
    offloading = ActivationOffloading(min_offload_bytes=64, allow_cpu=True)
    compilation = RegionalCompilation(backend=backend)
    fitted(make_trainer, ActivationCheckpointing(), offloading, compilation, module=module)
    assert compilation.graphs == 2  # forward and backward
    assert offloading.moved_bytes == 4 * 3 * (4 * 4 * 8)  # batches x blocks x an input of 4 rows
    fitted(make_trainer, RegionalCompilation(backend=backend), module=plain)
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


# --- no trace ---


def test_copies_and_pickles_in_a_fit_are_plain(make_trainer, tmp_path: Path):
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.copy = copy.deepcopy(pl_module.net)
            self.pickled = pickle.dumps(pl_module.net.blocks[0])
            torch.save(pl_module.net.state_dict(), file := io.BytesIO())
            self.keys = list(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
            self.compiled = [block._compiled_call_impl is not None for block in pl_module.net.blocks]

    saves = Saves()
    module = fitted(make_trainer, RegionalCompilation(backend="aot_eager"), saves, max_steps=1)
    assert saves.compiled == [True] * 3
    assert [block._compiled_call_impl for block in module.net.blocks] == [None] * 3
    assert [block._compiled_call_impl for block in saves.copy.blocks] == [None] * 3
    assert pickle.loads(saves.pickled)._compiled_call_impl is None
    assert saves.keys == list(Stack().state_dict())


@pytest.mark.long
def test_blocks_of_many_kinds_and_many_fits_are_all_compiled():
    for _ in range(5):
        counting = CountingBackend("aot_eager")
        kinds = {str(width): Block(width) for width in (4, 8, 12)}
        compile_blocks(kinds, counting)
        for width, block in kinds.items():
            block(torch.randn(4, int(width)))
        assert counting.graphs == 3  # 15 in all, where torch compiles a function 8 times at most


def test_restored_blocks_are_not_compiled_again():
    module, counting = stack(3, "aot_eager")
    restore_compiled(module.blocks)
    restore_compiled(module.blocks)
    gradients(module)
    assert counting.graphs == 0


# --- what is refused, and what is said ---


def test_blocks_that_are_compiled_already_are_refused(make_trainer):
    module = regression(L)
    module.net.blocks[1].up.compile(backend="eager")
    with pytest.raises(
        ConflictError, match=mentions("net.blocks.1 ", "callback.regional_compilation.blocks=[ClassName]")
    ):
        fitted(make_trainer, RegionalCompilation(backend="aot_eager"), module=module)
    assert module.net.blocks[0]._compiled_call_impl is None
    module = regression(L)
    module.net.blocks[1].up = torch.compile(module.net.blocks[1].up, backend="eager")
    with pytest.raises(ConflictError, match=mentions("net.blocks.1 ")):
        fitted(make_trainer, RegionalCompilation(backend="aot_eager"), module=module)


@pytest.mark.long
@pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(("backend", "same"), [("aot_eager", True), ("inductor", False)])
def test_inductor_alone_draws_other_dropout_masks(backend, same):
    blocks = {"0": nn.Dropout(0.5)}
    torch.manual_seed(0)
    plain = blocks["0"](torch.ones(64))
    compile_blocks(blocks, CountingBackend(backend))
    torch.manual_seed(0)
    assert torch.equal(blocks["0"](torch.ones(64)), plain) == same


def test_a_compiler_that_fails_is_an_error_that_says_what_to_write():
    @torch._dynamo.register_backend(name="failing")
    def failing(graph, inputs):
        raise TypeError("cannot determine truth value of Relational: 16*s22*s42 < 16")

    module, _ = stack(backend="failing")
    with pytest.raises(CapabilityError, match=r"failed at Block.*truth value.*dynamic=false") as caught:
        module(torch.randn(4, 8))
    assert isinstance(caught.value.__cause__, torch._dynamo.exc.BackendCompilerFailed)
    blocks = {"0": nn.Linear(8, 8)}
    compile_blocks(blocks, CountingBackend("failing"), dynamic=False)
    with pytest.raises(CapabilityError, match=r"failed at Linear: TypeError: .*backend=aot_eager") as caught:
        blocks["0"](torch.randn(4, 8))
    assert "dynamic=false" not in str(caught.value)


def test_a_module_without_blocks_is_refused(make_trainer):
    with pytest.raises(NothingToDoError, match=mentions("callback.regional_compilation.blocks=[ClassName]")):
        fitted(make_trainer, RegionalCompilation(), module=regression(L, nn.Linear(8, 1)))


def test_blocks_that_are_never_called_are_named(make_trainer):
    class Around(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block.forward(x)  # past __call__, and so past hooks and compilation
            return self.head(x)

    with pytest.warns(UserWarning, match=mentions("net.blocks.0", "callback.regional_compilation.blocks=[ClassName]")):
        fitted(make_trainer, RegionalCompilation(backend="aot_eager"), module=regression(L, Around()))


class Counter(nn.Module):
    """A block that the compiler takes for another one each time it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(8)
        self.mode = ""

    def forward(self, x: Tensor) -> Tensor:
        self.mode += "x"
        return self.inner(x) if self.mode else x


@pytest.mark.long
def test_compiling_in_every_batch_is_warned_of_once(make_trainer):
    net = nn.Sequential(Counter(), Counter(), nn.Linear(8, 1))
    with pytest.warns(
        UserWarning, match=mentions("callback.regional_compilation.dynamic=true", "TORCH_LOGS=recompiles")
    ) as warnings:
        fitted(make_trainer, RegionalCompilation(backend="aot_eager"), module=regression(L, net), max_steps=8)
    assert len([each for each in warnings if "TORCH_LOGS" in str(each.message)]) == 1


@pytest.mark.long
def test_other_sizes_are_compiled_once_for_all(make_trainer):
    callback = RegionalCompilation(backend="aot_eager")
    batches = [(torch.randn(size, 8), torch.randn(size, 1)) for size in (4, 5, 6, 7, 9, 11)]
    data = torch.utils.data.DataLoader(batches, batch_size=None)
    fitted(make_trainer, callback, data=data, max_steps=6)
    assert callback.graphs <= 4  # two for size 4, two for all others; 12 if each size had its own
