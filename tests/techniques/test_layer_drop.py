"""LayerDrop skips as many blocks in each micro-batch, in the form of their output, resumes and leaves no trace."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError
from lightning_solo.memory.category_peaks import compiled_parts
from lightning_solo.memory.ledger import saved_for_backward
from lightning_solo.nn.blocks import named_blocks
from lightning_solo.nn.layer_drop import SkippedBlocks
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.layer_drop.technique import LayerDrop
from lightning_solo.techniques.regional_compilation.technique import RegionalCompilation
from tests.messages import mentions
from tests.models import small_batch, small_model
from tests.modules import Block, Stack, loader, regression

Make = Callable[..., Any]
BLOCKS = 4


class Watch(L.Callback):
    """Notes which blocks were to be skipped in each micro-batch, and which have no gradient behind its backward."""

    def __init__(self, technique: LayerDrop) -> None:
        self.technique = technique
        self.skipped: list[tuple[str, ...]] = []
        self.without_gradient: list[tuple[str, ...]] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        names = [f"net.blocks.{name}" for name, _ in pl_module.net.blocks.named_children()]
        none = [name for name in names if all(p.grad is None for p in pl_module.get_submodule(name).parameters())]
        self.skipped.append(self.technique.skipped)
        self.without_gradient.append(tuple(none))


def stack(**arguments: Any) -> Stack:
    torch.manual_seed(1)
    return Stack(BLOCKS, **arguments)


def fit(make_trainer: Make, *callbacks: Any, home: ModuleType = L, net: Any = None, **arguments: Any) -> Any:
    """Return the module and the Trainer of a fit of eight batches."""
    module = regression(home, net or stack())
    trainer = make_trainer(home, callbacks=list(callbacks), **arguments)
    torch.manual_seed(2)
    trainer.fit(module, loader(8))
    return module, trainer


# --- acted ---


@pytest.mark.any_device
@pytest.mark.every_change
@pytest.mark.parametrize("count", [1, 3])
def test_as_many_blocks_are_skipped_in_each_micro_batch(make_trainer: Make, count: int) -> None:
    technique = LayerDrop(count)
    watch = Watch(technique)
    fit(make_trainer, technique, watch)
    assert [len(names) for names in watch.skipped] == [count] * 8
    assert watch.without_gradient == watch.skipped
    assert len(set(watch.skipped)) > 1
    assert technique.skipped == ()


def test_each_block_is_skipped_equally_often() -> None:
    drop = SkippedBlocks(dict(stack().blocks.named_children()), 1, seed=5)
    times: Counter[str] = Counter()
    for _ in range(4000):
        drop.draw()
        times.update(drop.skipped)
    assert all(800 < times[name] < 1200 for name in drop.blocks)  # 1000 on average, with a deviation of 27


# --- parity ---


def test_forward_equals_the_model_without_the_skipped_blocks() -> None:
    whole, short = stack(), stack()
    drop = SkippedBlocks(dict(whole.blocks.named_children()), 2, seed=0)
    drop.draw()
    short.blocks = nn.Sequential(*[b for name, b in short.blocks.named_children() if name not in drop.skipped])
    x = torch.randn(4, 8)
    assert torch.equal(whole(x), short(x))
    assert not torch.equal(whole(x), stack()(x))
    whole.eval()
    assert torch.equal(whole(x), stack()(x))  # validation runs all


def test_weights_of_skipped_blocks_stay(make_trainer: Make) -> None:
    class Pinned(LayerDrop):
        def training_step(self, ctx: Any, proceed: Any, *args: Any, **kwargs: Any) -> Any:
            assert self._drop is not None
            self._drop.skipped = frozenset({"net.blocks.1"})
            return proceed(*args, **kwargs)

    start = stack().state_dict()
    weights = fit(make_trainer, Pinned())[0].net.state_dict()
    moved = {name.split(".")[1] for name, w in start.items() if "blocks" in name and not torch.equal(weights[name], w)}
    assert moved == {"0", "2", "3"}


def test_torch_s_random_numbers_are_left_alone(make_trainer: Make) -> None:
    class Draws(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            self.state = torch.get_rng_state()

    states = []
    for callbacks in ([], [LayerDrop(1)]):
        draws = Draws()
        # in training mode without an effect: dropout draws as often, whatever is skipped
        fit(make_trainer, *callbacks, draws, max_steps=1, net=stack(dropout=0.0))
        states.append(draws.state)
    assert torch.equal(*states)
    block = nn.ModuleDict({"0": Block(8, 0.5), "1": Block(8, 0.5)})
    drop = SkippedBlocks(dict(block.named_children()), 1, seed=0)
    drop.draw()
    before = torch.get_rng_state()
    block[next(iter(drop.skipped))](torch.randn(4, 8, generator=torch.Generator()))  # it is tried, with dropout
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_and_recomputed_blocks_are_skipped_alike(make_trainer: Make, compiled: bool, recomputed: bool) -> None:
    torch._dynamo.reset()
    compilation = RegionalCompilation(backend="aot_eager")
    others = [*([ActivationCheckpointing()] if recomputed else []), *([compilation] if compiled else [])]
    technique = LayerDrop(2)
    watch = Watch(technique)
    module, _ = fit(make_trainer, technique, watch, *others)
    expected, _ = fit(make_trainer, LayerDrop(2))
    assert watch.without_gradient == watch.skipped
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
    if compiled:
        assert 1 <= compilation.graphs <= 2  # of an input with and without a gradient, whatever is skipped


def test_nothing_is_lost_under_autocast_when_a_block_is_tried(make_trainer: Make) -> None:
    class Shrinks(nn.Module):  # it is drawn, tried without gradients, and runs after all
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width // 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x)))

    block = Shrinks(8)
    drop = SkippedBlocks({"0": block, "1": Block(8)}, 1, seed=0)
    drop.skipped = frozenset({"0"})
    with torch.autocast("cpu", torch.bfloat16):
        output = block(torch.randn(4, 8))
    output.sum().backward()
    assert list(drop.left_out) == ["0"]
    assert all(p.grad is not None for p in block.parameters())


# --- memory ---


@pytest.mark.parametrize("count", [1, 3])
def test_skipped_blocks_save_nothing_for_backward(count: int) -> None:
    def saved(net: nn.Module) -> int:
        return saved_for_backward(net, x)[1]

    x = torch.randn(64, 8, requires_grad=True)
    module = stack()
    whole, head = saved(module), saved(Stack(0))
    drop = SkippedBlocks(dict(module.blocks.named_children()), count, seed=0)
    module(x)  # from here on it is known in what form the blocks return their output
    drop.draw()
    assert saved(module) - head == (whole - head) * (BLOCKS - count) // BLOCKS


# --- no trace, and resuming ---


def test_a_run_that_is_resumed_draws_as_the_undisturbed_one(make_trainer: Make, tmp_path: Any) -> None:
    def run(epochs: int, path: Any = None, seed: int = 2) -> tuple[list[Any], Any, Any]:
        technique = LayerDrop(1)
        watch = Watch(technique)
        module = regression(L, stack())
        trainer = make_trainer(L, callbacks=[technique, watch], max_epochs=epochs)
        torch.manual_seed(seed)
        trainer.fit(module, loader(8), ckpt_path=path)
        return watch.skipped, module.state_dict(), trainer

    whole, weights, _ = run(2)
    first, _, trainer = run(1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    then, resumed, _ = run(2, tmp_path / "one.ckpt", seed=9)
    assert first + then == whole
    assert then != first
    assert all(torch.equal(resumed[name], weight) for name, weight in weights.items())


def test_a_checkpoint_of_another_kind_is_refused() -> None:
    for state in ({"seed": 1}, {"seed": 1, "draws": "2"}, {"seed": 1, "draws": 2, "other": 3}):
        with pytest.raises(CheckpointError, match=mentions("LayerDrop", "seed")):
            LayerDrop().load_state_dict(state)


def test_copies_and_pickles_in_a_fit_are_plain(make_trainer: Make) -> None:
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.copies = [copy.deepcopy(pl_module.net), pickle.loads(pickle.dumps(pl_module.net))]
            self.compiled = compiled_parts(pl_module.net)

    saves = Saves()
    module, _ = fit(make_trainer, LayerDrop(3), saves)
    assert saves.compiled == []  # nothing is, whatever the way of the call
    for net in (*saves.copies, module.net):
        assert all(block._compiled_call_impl is None for block in net.blocks)
        assert len(net(torch.randn(2, 8))) == 2


# --- the forms of outputs ---


def transformer(kind: str, cached: bool) -> Any:
    return small_model(kind, "ForConditionalGeneration" if kind == "T5" else "ForCausalLM", use_cache=cached)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "T5"])
def test_blocks_of_transformers_are_skipped(kind: str, cached: bool) -> None:
    model, batch = transformer(kind, cached), small_batch()
    blocks = named_blocks(model)
    drop = SkippedBlocks(blocks, 1, seed=3)
    tried = set()
    for _ in range(24):
        drop.draw()
        model.train().zero_grad()
        model(**batch).loss.backward()
        none = {name for name, block in blocks.items() if all(p.grad is None for p in block.parameters())}
        assert none == drop.skipped - set(drop.left_out)
        tried |= none
    # T5's first blocks make the position bias for all others
    firsts = {"encoder.block.0", "decoder.block.0"} if kind == "T5" else set()
    assert set(drop.left_out) == firsts
    assert tried == set(blocks) - firsts


@pytest.mark.parametrize("name", ["encoder.block.0", "decoder.block.0"])
def test_a_block_that_was_tried_and_then_runs_finds_the_cache_empty(name: str) -> None:
    model, batch = transformer("T5", cached=True), small_batch()

    def loss() -> Tensor:
        torch.manual_seed(0)
        return model.train()(**batch).loss  # type: ignore[no-any-return]

    plain = loss()
    drop = SkippedBlocks(named_blocks(model), 1, seed=3)
    drop.skipped = frozenset([name])
    assert torch.equal(loss(), plain)
    assert name in drop.left_out


@pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training")
def test_blocks_in_eval_mode_are_named_with_the_remedy(make_trainer: Make) -> None:
    with pytest.raises(NothingToDoError, match=mentions("net.blocks.0", ".train()")):
        fit(make_trainer, LayerDrop(1), net=stack().eval())


def test_blocks_that_change_the_shape_are_named_and_run(make_trainer: Make) -> None:
    class Halves(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, :8]

    class Net(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.cat([x, x], 1))

    net = Net(3, width=16)
    net.blocks.append(Halves(16))
    net.head = nn.Linear(8, 1)
    technique = LayerDrop(1, blocks=["Block", "Halves"])
    watch = Watch(technique)
    with pytest.warns(UserWarning, match=mentions("net.blocks.3", "(4, 8)")):
        fit(make_trainer, technique, watch, net=net)
    assert all(names == ("net.blocks.3",) or "net.blocks.3" not in names for names in watch.skipped)
    assert [len(names) for names in watch.without_gradient][1:] == [1] * 7
    drop = SkippedBlocks({"net.blocks.3": Halves(16), "other": Halves(16)}, 1, seed=0)
    for block in drop.blocks.values():
        block(torch.randn(4, 16))
    with pytest.raises(
        NothingToDoError, match=mentions("layer_drop.count=1", "net.blocks.3", "callback.layer_drop.blocks=[ClassName]")
    ):
        drop.draw()


# --- what is refused ---


@pytest.mark.parametrize(("engine", "finds"), [("ddp", True), ("fsdp", False)])
def test_engines_that_would_wait_for_skipped_blocks_or_change_them_are_refused(engine: str, finds: bool) -> None:
    def composed(value: bool) -> object:
        overrides = ["+callback=layer_drop", "devices=2", f"strategy.find_unused_parameters={value}"]
        return compose(engine, overrides)

    assert composed(finds)
    with pytest.raises(ConflictError, match=mentions(f"strategy={engine}", f"find_unused_parameters={finds}".lower())):
        composed(not finds)


def test_zero_offload_which_would_change_skipped_blocks_is_refused() -> None:
    with pytest.raises(ConflictError, match=mentions("layer_drop", "strategy=zero_offload", "gradients of zero")):
        compose("zero_offload", ["+callback=layer_drop"])


def test_more_blocks_than_there_are_but_one_are_refused(make_trainer: Make) -> None:
    with pytest.raises(PresetError, match=mentions("layer_drop.count=4", "net.blocks.3", "count=3")):
        fit(make_trainer, LayerDrop(4))
    with pytest.raises(
        PresetError, match=mentions("layer_drop.count=1", "1 Block", "callback.layer_drop.blocks=[ClassName]")
    ) as error:
        SkippedBlocks({"block": stack().blocks[0]}, 1, seed=0)
    assert "count=1 or less" not in str(error.value)


def test_a_module_that_is_compiled_whole_is_refused(make_trainer: Make) -> None:
    net = stack()
    net.compile(backend="eager")
    with pytest.raises(ConflictError, match=mentions("net ", "callback=regional_compilation")):
        fit(make_trainer, LayerDrop(1), net=net)


def test_blocks_that_are_never_called_are_named(make_trainer: Make) -> None:
    class Around(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block.forward(x)  # past __call__
            return self.head(x)

    with pytest.raises(NothingToDoError, match=mentions("net.blocks.0", "callback.layer_drop.blocks=[ClassName]")):
        fit(make_trainer, LayerDrop(1), net=Around(3))
