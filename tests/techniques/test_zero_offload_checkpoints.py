"""ZeRO-Offload's checkpoints, and our callbacks and a user's hooks under it, on the real engine beside a plain run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

import lightning_solo as solo
from lightning_solo.errors import CheckpointError
from lightning_solo.guard import PresetGuard
from lightning_solo.seams.homes import for_home
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.zero_offload.technique import ZeroOffloadStrategy
from lightning_solo.zero.module import MODULE_HOOKS
from tests.messages import mentions
from tests.modules import Block, Resumable, Stack, loader, regression
from tests.training import equal

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = [
    # DeepSpeed's own calls, at stage 3, on torch 2.13
    pytest.mark.filterwarnings("ignore:`torch.distributed.all_gather_into_tensor` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_scatter_tensor` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU"),
    # Trainers that resume keep no checkpoints here.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used"),
]
STAGE_2 = {"stage": 2}
# Otherwise weights as small as these are never released.
ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
STAGE_3 = {"stage": 3, "offload_parameters": True, "config": ALL}
# Each stage under one home of Lightning: what is tested here knows no home.
stages = pytest.mark.parametrize(
    ("home", "arguments"),
    [("lightning.pytorch", STAGE_2), ("pytorch_lightning", STAGE_3)],
    indirect=["home"],
    ids=["stage2", "stage3"],
)


class Frozen(Stack):
    """A stack whose first block is not trained, with two buffers, of which one is saved."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.blocks[0].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)


class Tied(nn.Module):
    """Two layers with one weight under two names, (batch, width) -> (batch, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(8, 8)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.relu(self.encode(x))).sum(1, keepdim=True)


def strategy(home: ModuleType, **arguments: Any) -> Any:
    return for_home(ZeroOffloadStrategy, home.__name__)(**{"allow_cpu": True, "host_optimizer": "torch", **arguments})


def module(home: ModuleType, net: Callable[[], nn.Module] = Stack, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return regression(home, net())


def kept(home: ModuleType, folder: Path, **arguments: Any) -> Any:
    return home.callbacks.ModelCheckpoint(dirpath=folder / "kept", **{"filename": "{epoch}", **arguments})


def saving(home: ModuleType, make_trainer: Any, folder: Path, made: Any, given: Any = None, **arguments: Any) -> Path:
    """Train one epoch with a strategy (None: plain), save at its end, and return the file."""
    keep = kept(home, folder)
    given = {"strategy": given} if given else {}
    trainer = make_trainer(home, enable_checkpointing=True, callbacks=[keep], **given, **arguments)
    trainer.fit(made, loader())
    return Path(keep.best_model_path)


# --- the file ---


@stages
def test_the_file_holds_the_masters_and_the_buffers(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    """Under bf16-mixed: fp32 values which are not those that the device's bf16 weights would give."""
    released: list[int] = []
    start: dict[str, Tensor] = {}

    class Look(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            masters = trainer.strategy.lightning_module_state_dict()
            start.update({name: value.clone() for name, value in masters.items()})

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            released.append(sum(p.numel() == 0 for p in pl_module.parameters()))

    made = module(home, Frozen)
    keep = kept(home, tmp_path)
    trainer = make_trainer(
        home,
        strategy=strategy(home, **arguments),
        precision="bf16-mixed",
        callbacks=[keep, Look()],
        enable_checkpointing=True,
    )
    trainer.fit(made, loader())
    found = module(home, Frozen).state_dict()
    assert all(torch.equal(start[name], value) for name, value in found.items())  # not their bf16 roundings
    assert set(released) == ({0} if arguments["stage"] == 2 else {len(list(made.parameters()))})
    state = torch.load(keep.best_model_path, weights_only=True)["state_dict"]
    assert list(state) == list(made.state_dict())
    assert "net.scratch" not in state
    assert state["net.seen"] == 10
    assert {value.dtype for value in state.values()} == {torch.float32}
    trained = [name for name, p in made.named_parameters() if p.requires_grad]
    assert not [name for name in trained if torch.equal(state[name], state[name].bfloat16().float())]
    assert all(torch.equal(state[name], value) for name, value in made.state_dict().items())


@stages
def test_frozen_weights_come_back_to_the_bit(home: ModuleType, make_trainer: Any, arguments: Any) -> None:
    made = module(home, Frozen)
    before = {name: value.clone() for name, value in made.net.blocks[0].state_dict().items()}
    dtypes: set[torch.dtype] = set()
    made.on_train_batch_start = lambda *_: dtypes.update(p.dtype for p in made.parameters())
    make_trainer(home, strategy=strategy(home, **arguments), precision="bf16-mixed").fit(made, loader())
    after = made.net.blocks[0].state_dict()
    assert dtypes == {torch.bfloat16}
    assert [name for name, value in before.items() if not torch.equal(value, value.bfloat16().float())]
    assert all(torch.equal(value, before[name]) for name, value in after.items())


@stages
def test_frozen_weights_are_left_out_where_asked(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    undisturbed, first, second = (module(home, Frozen) for _ in range(3))
    make_trainer(home, max_epochs=2).fit(undisturbed, loader())
    whole = saving(home, make_trainer, tmp_path / "whole", first, strategy(home, **arguments))
    without = strategy(home, **arguments, exclude_frozen_parameters=True)
    file = saving(home, make_trainer, tmp_path / "part", module(home, Frozen), without)
    state = torch.load(file, weights_only=True)["state_dict"]
    assert set(first.state_dict()) - set(state) == {f"net.blocks.0.{name}" for name in first.net.blocks[0].state_dict()}
    assert file.stat().st_size < whole.stat().st_size - 4 * 8 * 32  # at least one of its matrices
    resuming = make_trainer(home, max_epochs=2, strategy=strategy(home, **arguments))
    resuming.fit(second, loader(), ckpt_path=file)
    assert equal(second, undisturbed)

    saved = torch.load(file, weights_only=True)
    del saved["state_dict"]["net.head.bias"]
    torch.save(saved, tmp_path / "less.ckpt")
    with pytest.raises(RuntimeError, match=mentions("Missing key", "net.head.bias")):
        make_trainer(home, max_epochs=2, strategy=strategy(home, **arguments)).fit(
            module(home, Frozen), loader(), ckpt_path=tmp_path / "less.ckpt"
        )


@stages
def test_tied_weights_are_saved_under_both_names_and_stay_tied(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    undisturbed, first, second = (module(home, Tied) for _ in range(3))
    make_trainer(home, max_epochs=2).fit(undisturbed, loader())
    file = saving(home, make_trainer, tmp_path, first, strategy(home, **arguments))
    state = torch.load(file, weights_only=True)["state_dict"]
    assert torch.equal(state["net.encode.weight"], state["net.decode.weight"])
    assert torch.equal(state["net.encode.weight"], first.net.encode.weight)
    resuming = make_trainer(home, max_epochs=2, strategy=strategy(home, **arguments))
    resuming.fit(second, loader(), ckpt_path=file)
    assert second.net.encode.weight is second.net.decode.weight
    assert equal(second, undisturbed)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("host", ["auto", "torch", pytest.param("deepspeed", marks=pytest.mark.long)])
@stages
def test_a_save_after_the_fit_is_that_of_its_end(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any, precision: Any, host: str
) -> None:
    made = module(home, Frozen)
    made.configure_optimizers = lambda: [
        [optimizer := torch.optim.AdamW(made.parameters(), lr=1e-2)],
        [{"scheduler": LambdaLR(optimizer, lambda step: 0.9**step), "interval": "step"}],
    ]
    given = {"precision": precision, "strategy": strategy(home, **arguments, host_optimizer=host)}
    keep = kept(home, tmp_path)
    trainer = make_trainer(home, enable_checkpointing=True, callbacks=[keep], **given)
    trainer.fit(made, loader())
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    during, late = (torch.load(path, weights_only=True) for path in (keep.best_model_path, tmp_path / "late.ckpt"))
    assert late["zero_offload"] == during["zero_offload"]
    assert late["lr_schedulers"] == during["lr_schedulers"]
    assert_equal(late["state_dict"], during["state_dict"])
    assert_equal(late["optimizer_states"], during["optimizer_states"])
    assert late["optimizer_states"][0]["state"]
    assert_equal(trainer.optimizers[0].state_dict(), during["optimizer_states"][0])  # as after a plain run
    trainer.validate(made, loader(), verbose=False)
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert_equal(torch.load(tmp_path / "later.ckpt", weights_only=True)["optimizer_states"], late["optimizer_states"])


@stages
def test_a_run_resumes_from_a_save_after_the_fit(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    """Lightning counts an epoch that was saved behind its end as done, a whole fit as well."""
    undisturbed, first = module(home, Frozen), module(home, Frozen)
    make_trainer(home, max_epochs=2).fit(undisturbed, loader())
    trainer = make_trainer(home, strategy=strategy(home, **arguments))
    trainer.fit(first, loader())
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    for given in ({}, {"strategy": strategy(home, **arguments)}):
        second = module(home, Frozen, seed=1)
        make_trainer(home, max_epochs=2, **given).fit(second, loader(), ckpt_path=tmp_path / "late.ckpt")
        assert equal(second, undisturbed)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(first, loader(), ckpt_path=tmp_path / "late.ckpt")  # the same Trainer goes on
    assert equal(first, undisturbed)


def assert_equal(ours: Any, theirs: Any) -> None:
    """Compare tensors in mappings and lists to the bit."""
    if isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert_equal(ours[key], value)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    else:
        assert ours == theirs


@stages
def test_masters_of_weights_that_were_made_in_bf16_are_saved_after_the_fit(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    made = module(home).bfloat16()
    keep = kept(home, tmp_path)
    given = {"strategy": strategy(home, **arguments), "precision": "bf16-true"}
    trainer = make_trainer(home, enable_checkpointing=True, callbacks=[keep], **given)
    trainer.fit(made, loader())
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
    during = torch.load(keep.best_model_path, weights_only=True)["state_dict"]
    trainer.save_checkpoint(tmp_path / "late.ckpt", weights_only=True)
    late = torch.load(tmp_path / "late.ckpt", weights_only=True)["state_dict"]
    assert {value.dtype for value in late.values()} == {torch.float32}
    assert_equal(late, during)
    with torch.no_grad():
        made.net.head.weight.zero_()  # what is changed afterwards counts
    trainer.save_checkpoint(tmp_path / "zero.ckpt", weights_only=True)
    assert not torch.load(tmp_path / "zero.ckpt", weights_only=True)["state_dict"]["net.head.weight"].any()


@stages
def test_after_the_fit_there_is_no_engine_to_write_its_directory(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    trainer = make_trainer(home, strategy=strategy(home, **arguments, save_engine_directory=True))
    trainer.fit(module(home), loader())
    with pytest.warns(UserWarning, match=mentions("late.ckpt", "save_last=True")):
        trainer.save_checkpoint(tmp_path / "late.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["late.ckpt"]


@stages
def test_a_module_that_builds_its_layers_in_configure_model(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    """Whole, on the host: Lightning's own strategy partitions each layer as it is built, before anybody has seen it."""
    sizes: list[int] = []

    def late() -> Any:
        made = module(home, nn.Identity)

        def build() -> None:
            if isinstance(made.net, nn.Identity):
                torch.manual_seed(0)
                made.net = Stack()
                sizes.append(sum(p.numel() for p in made.parameters()))

        made.configure_model = build
        return made

    undisturbed, first, second = module(home), late(), late()
    whole = sum(p.numel() for p in undisturbed.parameters())
    make_trainer(home, max_epochs=2).fit(undisturbed, loader())
    file = saving(home, make_trainer, tmp_path, first, strategy(home, **arguments))
    assert torch.load(file, weights_only=True)["state_dict"].keys() == undisturbed.state_dict().keys()
    resuming = make_trainer(home, max_epochs=2, strategy=strategy(home, **arguments))
    resuming.fit(second, loader(), ckpt_path=file)
    assert sizes == [whole, whole]
    assert equal(second, undisturbed)


# --- DeepSpeed's own directory ---


@stages
def test_the_engines_directory_leaves_frozen_weights_out_where_asked(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    without = strategy(home, **arguments, save_engine_directory=True, exclude_frozen_parameters=True)
    file = saving(home, make_trainer, tmp_path, module(home, Frozen), without)
    model = next(Path(f"{file}.deepspeed", "checkpoint").glob("*model_states.pt"))
    assert torch.load(model, weights_only=False)["frozen_param_shapes"] is None  # DeepSpeed's own file, written here


@stages
def test_the_engines_directory_comes_and_goes_with_its_file(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    """DeepSpeed's own reader finds in it what is in the plain file."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    there: list[list[str]] = []
    made = module(home, Frozen)
    made.on_train_epoch_start = lambda: there.append(sorted(path.name for path in (tmp_path / "kept").glob("*")))
    trainer = make_trainer(
        home,
        strategy=strategy(home, **arguments, save_engine_directory=True),
        precision="bf16-mixed",
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[kept(home, tmp_path, save_top_k=1)],
    )
    trainer.fit(made, loader())
    assert there == [[], ["epoch=0.ckpt", "epoch=0.ckpt.deepspeed"]]
    assert sorted(path.name for path in (tmp_path / "kept").glob("*")) == ["epoch=1.ckpt", "epoch=1.ckpt.deepspeed"]
    directory = tmp_path / "kept" / "epoch=1.ckpt.deepspeed"
    state = torch.load(tmp_path / "kept" / "epoch=1.ckpt", weights_only=True)["state_dict"]
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(directory))
    trained = {name for name, p in made.named_parameters() if p.requires_grad}
    assert trained <= set(theirs)
    assert all(torch.equal(theirs[name], state[name]) for name in trained)

    with pytest.raises(CheckpointError, match=mentions("DeepSpeed's engine", "lightning-solo export")):
        make_trainer(home, strategy=strategy(home, **arguments)).fit(module(home, Frozen), ckpt_path=directory)


# --- resuming ---


@pytest.mark.parametrize(("first", "second"), [(STAGE_2, STAGE_3), (STAGE_3, STAGE_2)])
def test_one_stage_resumes_the_others_run(
    home: ModuleType, make_trainer: Any, tmp_path: Path, first: Any, second: Any
) -> None:
    undisturbed, resumed = module(home, Frozen), module(home, Frozen, seed=1)
    make_trainer(home, max_epochs=2).fit(undisturbed, loader())
    file = saving(home, make_trainer, tmp_path, module(home, Frozen), strategy(home, **first))
    trainer = make_trainer(home, max_epochs=2, strategy=strategy(home, **second))
    trainer.fit(resumed, loader(), ckpt_path=file)
    assert equal(resumed, undisturbed)
    assert trainer.global_step == 20


@stages
def test_the_hosts_loop_is_not_in_the_file_and_stays_when_a_file_is_resumed(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    fused: list[bool] = []
    optimizers: list[torch.optim.Optimizer] = []

    def watched() -> Any:
        made = module(home)

        def configure() -> torch.optim.Optimizer:
            optimizers.append(torch.optim.AdamW(made.parameters(), lr=1e-2))
            return optimizers[-1]

        made.configure_optimizers = configure
        made.on_train_batch_end = lambda *_: fused.append(optimizers[-1].param_groups[0]["fused"])
        return made

    files = [
        saving(home, make_trainer, tmp_path / "plain", watched()),
        saving(home, make_trainer, tmp_path / "ours", watched(), strategy(home, host_optimizer="auto", **arguments)),
    ]
    assert fused == [None] * 10 + [True] * 10
    assert {torch.load(f, weights_only=True)["optimizer_states"][0]["param_groups"][0]["fused"] for f in files} == {
        None
    }
    for file in files:
        trainer = make_trainer(home, max_epochs=2, strategy=strategy(home, host_optimizer="auto", **arguments))
        trainer.fit(watched(), loader(), ckpt_path=file)
    assert fused[20:] == [True] * 20
    assert [optimizer.param_groups[0]["fused"] for optimizer in optimizers] == [None] * 4


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], dict[str, Any]]] = {
    "lambda": lambda o: {
        "scheduler": LambdaLR(o, [lambda step: 1 / (1 + step), lambda step: 0.9**step]),
        "interval": "step",
    },
    # Turns the momentum too, which is in the groups.
    "one_cycle": lambda o: {"scheduler": OneCycleLR(o, max_lr=[0.02, 0.05], total_steps=40), "interval": "step"},
    # The loss falls, so that "max" finds no progress.
    "plateau": lambda o: {
        "scheduler": ReduceLROnPlateau(o, mode="max", factor=0.5, patience=0),
        "monitor": "training/loss",
    },
}


@pytest.mark.parametrize("schedule", SCHEDULERS)
@stages
def test_groups_and_a_schedule_continue_where_they_were(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any, schedule: str
) -> None:
    """Beside a plain run that is saved and resumed: Lightning saves before a schedule by epoch steps."""
    optimizers: list[torch.optim.Optimizer] = []

    def grouped() -> Any:
        made = module(home, Frozen)

        def configure() -> dict[str, Any]:
            matrices = [p for p in made.parameters() if p.dim() == 2]  # some are frozen
            vectors = [p for p in made.parameters() if p.dim() == 1]
            groups = [{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 3e-3, "weight_decay": 0.0}]
            optimizers.append(torch.optim.AdamW(groups))
            return {"optimizer": optimizers[-1], "lr_scheduler": SCHEDULERS[schedule](optimizers[-1])}

        def training_step(batch: Any, batch_idx: int) -> Tensor:
            loss = made.step(batch)
            made.log("training/loss", loss, on_step=False, on_epoch=True, batch_size=4)
            return loss

        made.configure_optimizers, made.training_step = configure, training_step
        return made

    results = []
    for plain in (True, False):
        given = {} if plain else {"strategy": strategy(home, **arguments)}
        file = saving(home, make_trainer, tmp_path / str(plain), grouped(), given.get("strategy"), max_epochs=3)
        results.append(grouped())
        given = {} if plain else {"strategy": strategy(home, **arguments)}
        make_trainer(home, max_epochs=4, **given).fit(results[-1], loader(), ckpt_path=file)
    assert equal(*results)
    _, plain, _, ours = [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    assert ours == plain
    assert [group["lr"] for group in plain] != [1e-2, 3e-3]


@stages
def test_a_checkpoint_with_other_groups_is_refused(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    file = saving(home, make_trainer, tmp_path, module(home))
    made = module(home)
    count = len(list(made.parameters()))
    made.configure_optimizers = lambda: torch.optim.AdamW(
        [{"params": list(made.net.blocks.parameters())}, {"params": list(made.net.head.parameters())}]
    )
    with pytest.raises(CheckpointError, match=rf"groups of \[{count}\] parameters.*has \[{count - 2}, 2\]"):
        make_trainer(home, max_epochs=2, strategy=strategy(home, **arguments)).fit(made, loader(), ckpt_path=file)
    assert not torch.distributed.is_initialized()


@stages
def test_counts_of_steps_that_differ_are_refused(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    """A plain AdamW counts for each parameter the steps in which it had a gradient; ZeRO has one count."""
    file = saving(home, make_trainer, tmp_path, module(home))
    saved = torch.load(file, weights_only=True)
    saved["optimizer_states"][0]["state"][0]["step"] -= 3
    torch.save(saved, file)
    with pytest.raises(CheckpointError, match=mentions("'step'", "from 7.0 to 10.0", "weights")):
        make_trainer(home, max_epochs=2, strategy=strategy(home, **arguments)).fit(
            module(home), loader(), ckpt_path=file
        )


@stages
def test_validate_test_and_predict_load_a_file(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    file = saving(home, make_trainer, tmp_path, module(home, Frozen), strategy(home, **arguments))
    results = []
    for given in ({}, {"strategy": strategy(home, **arguments)}):
        trainer, made = make_trainer(home, **given), module(home, Frozen, seed=1)
        found = [*trainer.validate(made, loader(), ckpt_path=file, verbose=False)]
        made.load_state_dict(module(home, Frozen, seed=2).state_dict())
        found += trainer.test(made, loader(), ckpt_path=file, verbose=False)
        made.load_state_dict(module(home, Frozen, seed=2).state_dict())
        results.append((found, torch.cat(trainer.predict(made, loader(), ckpt_path=file))))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@stages
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings(
    "ignore:callback.accumulation_schedule. a window of 2 batches"
)  # the rest of the dropped one
@pytest.mark.parametrize(("schedule", "released"), [(False, True), (True, False), (True, True)])
def test_an_open_window_of_a_plain_run_is_dropped_with_a_warning(
    home: ModuleType, make_trainer: Any, tmp_path: Path, schedule: bool, released: bool, arguments: Any
) -> None:
    class Save(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.fit_loop.batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "amid.ckpt")

    def kwargs() -> dict[str, Any]:
        if schedule:
            return {"callbacks": [PresetGuard({}), solo.AccumulationSchedule([[0, 3]])]}
        return {"callbacks": [PresetGuard({})], "accumulate_grad_batches": 3}

    plain = kwargs()
    plain["callbacks"] += [Save(), *([GradientRelease()] if released else [])]
    make_trainer(home, **plain).fit(module(home), Resumable(list(loader())))
    trainer = make_trainer(home, strategy=strategy(home, **arguments), **kwargs())
    with pytest.warns(UserWarning, match=mentions("gradients", "dropped", "preset")) as caught:
        trainer.fit(module(home), Resumable(list(loader())), ckpt_path=tmp_path / "amid.ckpt", weights_only=True)
    assert sum("a window of 2 batches was divided by 3" in str(each.message) for each in caught) == schedule


# --- with our callbacks, and a user's hooks ---


def trained(home: ModuleType, make_trainer: Any, given: Any, callback: Any, net: Any = Stack) -> tuple[Any, Any]:
    made = module(home, net)
    strategies = {"strategy": given} if given else {}
    trainer = make_trainer(home, max_epochs=2, callbacks=[callback], **strategies)
    trainer.fit(made, loader())
    return made, trainer


@stages
def test_accumulation_schedule(home: ModuleType, make_trainer: Any, arguments: Any) -> None:
    pairs = [
        # Losses are weighed here, in a plain run gradients: of a power of two there is no rounding.
        trained(home, make_trainer, given, solo.AccumulationSchedule([[0, 1], [1, 4], [2, 2]], by="step"))
        for given in (None, strategy(home, **arguments))
    ]
    (plain, plain_trainer), (offloaded, trainer) = pairs
    assert trainer.global_step == plain_trainer.global_step == 5 + 5  # windows of 1, 4, 2, 2 and 1 batches, then of 2
    assert equal(offloaded, plain)
    assert not equal(offloaded, trained(home, make_trainer, None, home.Callback())[0])


@stages
def test_activation_checkpointing(home: ModuleType, make_trainer: Any, arguments: Any) -> None:
    calls: list[str] = []

    class Counted(Block):
        def forward(self, x: Tensor) -> Tensor:
            calls.append("forward" if torch.is_grad_enabled() else "no grad")
            return super().forward(x)

    class Net(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*[Counted(8, dropout=0.5) for _ in range(3)])

    counts, results, wrapped = [], [], []

    class Look(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            wrapped.append(trainer.callbacks[0].wrapped)

    for given in (None, strategy(home, **arguments)):
        calls.clear()
        checkpointing = solo.ActivationCheckpointing()
        made = module(home, Net)
        strategies = {"strategy": given} if given else {}
        make_trainer(home, callbacks=[checkpointing, Look()], **strategies).fit(made, loader())
        results.append(made)
        counts.append(len(calls))
        assert checkpointing.wrapped == ()
    assert wrapped == [("net.blocks.0", "net.blocks.1", "net.blocks.2")] * 2
    assert counts == [10 * 3 * 2] * 2  # forward, and again in backward
    assert equal(*results)


@stages
def test_a_users_hooks_act_in_every_run_and_stay(
    home: ModuleType, make_trainer: Any, tmp_path: Path, arguments: Any
) -> None:
    made = module(home)
    head, called = made.net.head, dict.fromkeys(("pre", "forward", "backward", "state", "load"), 0)

    def note(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            called[name] += 1

        return hook

    hooks = [
        head.register_forward_pre_hook(note("pre")),
        head.register_forward_hook(note("forward")),
        head.register_full_backward_hook(note("backward")),
        head._register_state_dict_hook(note("state")),
        head.register_load_state_dict_pre_hook(note("load")),
    ]
    trainer = make_trainer(home, strategy=strategy(home, **arguments))
    for run, backward in ((trainer.validate, 0), (trainer.test, 0), (trainer.predict, 0), (trainer.fit, 10)):
        called.update(dict.fromkeys(called, 0))
        run(made, loader())
        assert (called["pre"], called["forward"], called["backward"]) == (10, 10, backward)
    called.update(dict.fromkeys(called, 0))
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    make_trainer(home, strategy=strategy(home, **arguments)).validate(
        made, loader(), ckpt_path=tmp_path / "weights.ckpt", verbose=False
    )
    assert called["state"] > 0
    assert called["load"] > 0
    for hook in hooks:
        hook.remove()
    assert not [name for name in MODULE_HOOKS if vars(head)[name]]
