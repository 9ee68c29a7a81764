"""ShardedStrategy: modules that know nothing of it are sharded whole; several devices are in tests/engines."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import lightning_solo as solo
from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.memory.census import LEAST, Kind, take_census
from lightning_solo.memory.ledger import storages_of
from lightning_solo.nn.sharding import require_sharded, shard, sparse_embeddings
from lightning_solo.optim.schedule_free import ScheduleFreeAdamW
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.fsdp.technique import ShardedStrategy
from tests.engines.modules import Masked
from tests.messages import mentions
from tests.modules import Stack, regression
from tests.techniques.test_ddp import fitted
from tests.training import equal

AT_ONCE: dict[str, Any] = {"gradient_clip_val": None, "accumulate_grad_batches": 1}


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Return a mesh of this process alone."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise ChildProcessError where Lightning would start further processes."""

    def starts(launcher: object) -> None:
        raise ChildProcessError

    monkeypatch.setattr(_SubprocessScriptLauncher, "_call_children_scripts", starts)


def test_each_block_is_a_group_and_tied_weights_are_the_roots(mesh: Any) -> None:
    module = ByteGPT(width=16, depth=2, heads=2, context=8)
    shard(module, mesh, module.blocks, forward_methods=["training_step"])
    assert all(isinstance(p, DTensor) for p in module.parameters())
    assert module.head.weight is module.embedding.weight
    assert [type(block).__name__ for block in module.blocks] == ["FSDPBlock"] * 2
    assert type(module).__name__ == "FSDPByteGPT"


def test_the_module_is_as_before_once_it_is_restored(mesh: Any) -> None:
    module, expected = ByteGPT(width=16, depth=2, heads=2, context=8), ByteGPT(width=16, depth=2, heads=2, context=8)
    expected.load_state_dict(module.state_dict())
    names = [set(vars(part)) for part in module.modules()]
    hooks = [
        sum(len(value) for key, value in vars(part).items() if key.endswith("_hooks")) for part in module.modules()
    ]
    restore = shard(module, mesh, module.blocks, forward_methods=["training_step"])
    module(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    restore()
    assert [set(vars(part)) for part in module.modules()] == names
    assert hooks == [
        sum(len(value) for key, value in vars(part).items() if key.endswith("_hooks")) for part in module.modules()
    ]
    assert type(module) is ByteGPT
    assert not any(isinstance(p, DTensor) for p in module.parameters())
    assert module.head.weight is module.embedding.weight
    assert equal(expected, module)
    shard(module, mesh, module.blocks)  # again


def test_a_parameter_that_two_blocks_share_is_the_roots(mesh: Any) -> None:
    module = Stack(blocks=2)
    module.blocks[1].up.weight = module.blocks[0].up.weight
    shard(module, mesh, module.blocks)
    assert module.blocks[1].up.weight is module.blocks[0].up.weight
    module(torch.randn(2, 8)).sum().backward()
    assert module.blocks[0].up.weight.grad is not None


def test_shards_are_counted_as_weights(mesh: Any) -> None:
    module = Stack(blocks=2)
    weights = [len(parameter.untyped_storage()) for parameter in module.parameters()]
    shard(module, mesh, module.blocks)
    assert len(storages_of(list(module.parameters()))) == len(weights)
    assert sum(take_census(module).kinds[Kind("weights")].values()) == sum(max(each, LEAST) for each in weights)


def test_blocks_whose_outputs_are_views_changed_in_place_are_gathered_for_backward(mesh: Any) -> None:
    torch.manual_seed(0)
    module, x = Masked(), torch.randn(2, 12, 16)
    module(x).sum().backward()
    expected = [p.grad for p in module.parameters()]
    module.zero_grad()
    filters = [*warnings.filters]
    restore = shard(module, mesh, module.layers)
    module(x).sum().backward()
    assert equal([cast(DTensor, p.grad).to_local() for p in module.parameters()], expected)
    restore()
    assert not any(layer._forward_hooks for layer in module.layers)
    assert warnings.filters == filters


def test_a_parameter_outside_of_the_shards_is_refused_by_name(mesh: Any) -> None:
    module = Stack(blocks=2)
    shard(module, mesh, module.blocks)
    module.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ConflictError, match=mentions("scale", "ddp")):
        require_sharded(module)


def test_a_parameter_made_after_sharding_is_refused_before_it_trains(tmp_path: Path) -> None:
    module = regression(L, Stack(blocks=2))
    optimizers = module.configure_optimizers

    def late() -> Any:
        module.scale = nn.Parameter(torch.ones(1))
        return optimizers()

    module.configure_optimizers = late
    with pytest.raises(ConflictError, match=mentions("scale")):
        fitted("fsdp", tmp_path, module=module, devices=1)


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, ScheduleFreeAdamW])
def test_an_optimizer_of_whole_weights_is_refused_before_it_steps(optimizer: Any, tmp_path: Path) -> None:
    module = regression(L, Stack(blocks=2))
    module.configure_optimizers = lambda: optimizer(module.parameters())
    with pytest.raises(ConflictError, match=mentions(optimizer.__name__, "AdamW", "ddp")):
        fitted("fsdp", tmp_path, module=module, devices=1)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_module_that_optimizes_manually_is_refused_since_its_weights_would_not_train(
    devices: int, tmp_path: Path, no_processes: None
) -> None:
    module = regression(L, Stack(blocks=2))
    module.automatic_optimization = False
    with pytest.raises(ConflictError, match=mentions("automatic_optimization=False", "ddp", "zero3")):
        fitted("fsdp", tmp_path, module=module, devices=devices, **AT_ONCE)


@pytest.mark.parametrize("devices", [1, 2])
def test_blocks_that_dont_exist_are_refused_before_processes_start(
    devices: int, tmp_path: Path, no_processes: None
) -> None:
    assert ShardedStrategy(blocks=["Blok"]).settings.blocks == ["Blok"]
    words = ("strategy.blocks=[Blok]", "did you mean 'Block'", "there are Stack, ")
    with pytest.raises(NothingToDoError, match=mentions(*words)):
        fitted("fsdp", tmp_path, overrides=["strategy.blocks=[Blok]"], devices=devices)


@pytest.mark.parametrize("preset", ["ddp", "fsdp"])
def test_a_process_that_is_started_by_others_makes_a_trainer(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert L.Trainer(accelerator="cpu", logger=False, **solo.trainer_kwargs(preset, ["devices=2"])).world_size == 2


@pytest.mark.parametrize("hook", ["configure_model", "setup"])
def test_blocks_of_a_module_that_is_made_later_are_looked_for_then(
    hook: str, tmp_path: Path, no_processes: None
) -> None:
    module = regression(L, Stack(blocks=2))
    setattr(module, hook, lambda *args: None)
    with pytest.raises(ChildProcessError):
        fitted("fsdp", tmp_path, module, ["strategy.blocks=[Blok]"], devices=2)


def test_a_parameter_that_is_a_number_is_refused_by_name(mesh: Any) -> None:
    module = Stack(blocks=2)
    module.scale = nn.Parameter(torch.tensor(0.5))
    with pytest.raises(ConflictError, match=mentions("scale", "torch.tensor([0.5])", "ddp")):
        shard(module, mesh, module.blocks)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.EmbeddingBag(8, 4, sparse=True), ("more", "sparse=False")),
        (lambda: nn.ParameterList([torch.ones(4, dtype=torch.cfloat)]), ("more.0", "complex64", "view_as_real")),
        (lambda: nn.Linear(4, 4, dtype=torch.bfloat16), ("more.weight, more.bias", "float32 and bfloat16")),
    ],
    ids=["sparse", "complex", "two precisions"],
)
def test_what_fsdp2_cant_shard_is_refused_by_name(make: Any, words: tuple[str, ...], mesh: Any) -> None:
    module = Stack(blocks=2)
    module.more = make()
    with pytest.raises(ConflictError, match=mentions("FSDP2", *words, "the preset ddp")):
        shard(module, mesh, module.blocks)


def test_a_module_that_only_calls_itself_sparse_is_sharded(mesh: Any) -> None:
    module = Stack(blocks=2)
    module.blocks[0].sparse = True  # such as attention that leaves out keys
    undo = shard(module, mesh, module.blocks)
    undo()
    module.more = nn.Embedding(8, 4, sparse=True)
    assert sparse_embeddings(module) == ["more"]


def test_weights_of_two_precisions_that_lightning_converts_are_trained(tmp_path: Path) -> None:
    module = regression(L, Stack(blocks=2))
    module.net.blocks[1].up.to(torch.bfloat16)
    fitted("fsdp", tmp_path, module, ["precision=bf16-true"], devices=1)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def transposed() -> Any:
    """Return a module with a weight that isn't stored row by row."""
    torch.manual_seed(1)
    module = regression(L, Stack(blocks=2))
    for name, p in list(module.named_parameters()):
        if name.endswith("up.weight"):
            p.data = p.data.T.contiguous().T
    return module


def test_weights_in_another_order_of_memory_are_sharded(tmp_path: Path) -> None:
    module, _ = fitted("fsdp", tmp_path, module=transposed(), devices=1)
    plain, _ = fitted("baseline", tmp_path, module=transposed())
    names = dict(plain.named_parameters())
    assert not all(p.is_contiguous() for p in names.values())
    for name, p in module.named_parameters():
        torch.testing.assert_close(p, names[name], rtol=0, atol=1e-6)


def test_compact_states_refuse_weights_in_another_order_of_memory(tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match=mentions("compact_states", "up.weight", "contiguous()")):
        fitted(["fsdp", "compact"], tmp_path, module=transposed(), devices=1)


def test_compact_states_that_are_no_part_of_the_preset_refuse_mixed_precision(tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match=mentions("compact_states", "strategy=fsdp", "precision=bf16-true")):
        fitted("fsdp", tmp_path, devices=1, callbacks=[CompactStates()], precision="bf16-mixed", **AT_ONCE)


@pytest.mark.parametrize("preset", ["compact", "gradient_release"])
def test_compact_states_and_released_gradients_on_one_device_are_those_without_it(preset: str, tmp_path: Path) -> None:
    module, trainer = fitted(["fsdp", preset], tmp_path, devices=1, max_epochs=2, **AT_ONCE)
    plain, other = fitted(preset, tmp_path, max_epochs=2, **AT_ONCE)
    assert equal(plain, module)
    trainer.save_checkpoint(tmp_path / "shards.ckpt")
    other.save_checkpoint(tmp_path / "plain.ckpt")
    shards, whole = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("shards", "plain"))
    for state, same in zip(*(each["optimizer_states"][0]["state"].values() for each in (shards, whole)), strict=True):
        assert state.keys() == same.keys()
        assert all(torch.equal(state[key], same[key]) for key in state if isinstance(state[key], torch.Tensor))


KEEPS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "accumulation": ({"accumulate_grad_batches": 2}, ("release none", "write accumulate_grad_batches=1")),
    "norm": ({"gradient_clip_val": 0.5}, ("norm of all gradients", "gradient_clip_algorithm='value'")),
    "by hand": ({}, ("configure_gradient_clipping", "drop it")),
}
"""What keeps gradients until the step -> the Trainer's arguments, and words of the refusal."""


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("keeper", KEEPS)
def test_released_gradients_that_would_be_kept_are_refused_before_processes_start(
    keeper: str, devices: int, tmp_path: Path, no_processes: None
) -> None:
    arguments, words = KEEPS[keeper]
    module = regression(L, Stack(blocks=2))
    if keeper == "by hand":
        module.configure_gradient_clipping = lambda *args, **kwargs: None
    with pytest.raises(ConflictError, match=mentions("gradient_release", "strategy=fsdp", *words, "~callback")):
        fitted(["fsdp", "gradient_release"], tmp_path, module, devices=devices, **{**AT_ONCE, **arguments})


def test_released_gradients_clipped_by_value_are_those_without_sharding(tmp_path: Path) -> None:
    by_value = {**AT_ONCE, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    module, _ = fitted(["fsdp", "gradient_release"], tmp_path, devices=1, **by_value)
    plain, _ = fitted("gradient_release", tmp_path, **by_value)
    assert equal(plain, module)
    assert not equal(plain, fitted("gradient_release", tmp_path, **AT_ONCE)[0])


def test_weights_are_whole_and_fp32_again_after_compact_states_failed_to_set_up(tmp_path: Path) -> None:
    module = regression(L, Stack(blocks=2))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}

    def fails() -> Any:
        assert all(isinstance(p, DTensor) and p.dtype is torch.bfloat16 for p in module.parameters())
        raise KeyError("no optimizer")

    module.configure_optimizers = fails
    with pytest.raises(KeyError, match="no optimizer"):
        fitted(["fsdp", "compact"], tmp_path, module=module, devices=1, **AT_ONCE)
    for name, p in module.named_parameters():
        assert not isinstance(p, DTensor)
        torch.testing.assert_close(p.detach(), before[name], rtol=2**-15, atol=0)
