"""Each patch acts on its target in Lightning, is undone, and its test fails when the target is gone."""

from __future__ import annotations

import copy
import pickle
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_solo.attributes import replaced
from lightning_solo.errors import ConflictError
from lightning_solo.seams import patches, resuming
from lightning_solo.seams.homes import fabric_part, part
from lightning_solo.seams.strategy import AROUND
from tests.messages import mentions
from tests.modules import loader, regression

Make = Callable[..., Any]


def noting(calls: list[Any]) -> Callable[..., Any]:
    """Return what notes the arguments of calls, and passes them on."""

    def around(proceed: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            calls.append(args)
            return proceed(*args)

        return noted

    return around


def test_methods_of_a_strategy_are_replaced_for_a_while(home: ModuleType, make_trainer: Make) -> None:
    strategy, calls = make_trainer(home).strategy, []
    before = dict(vars(strategy))

    def teardown(own: Any) -> None:
        calls.append(own)

    with patches.methods_through(strategy, {"teardown": teardown}):
        strategy.teardown()
        for other in (copy.copy(strategy), copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
            assert type(other) is home.strategies.SingleDeviceStrategy
            assert other.root_device == strategy.root_device
            assert vars(other).keys() == before.keys()
    assert calls == [strategy.teardown]
    assert vars(strategy) == before


def test_fewer_training_items_than_processes_are_refused(home: ModuleType, make_trainer: Make) -> None:
    trainer = make_trainer(home, strategy="ddp", devices=2)
    stage = part(home.__name__, "trainer.states").RunningStage
    with patches.samplers_kept_in_order(trainer):
        resolve = trainer._data_connector._resolve_sampler
        with pytest.raises(ConflictError, match=mentions("fewer items", "1 < 2", "devices=1")):
            resolve(loader(1, batch_size=1), shuffle=False, mode=stage.TRAINING)
        with pytest.raises(TypeError, match="__len__"):  # of Lightning, which says what to write
            resolve(DataLoader([0.0], sampler=iter([0])), shuffle=False, mode=stage.TRAINING)
        for items, mode in ((2, stage.TRAINING), (1, stage.VALIDATING)):
            assert len(resolve(loader(items, batch_size=1), shuffle=False, mode=mode)) == 1
    assert (
        len(trainer._data_connector._resolve_sampler(loader(1, batch_size=1), shuffle=False, mode=stage.TRAINING)) == 1
    )


def test_an_observer_kills_through_a_function(home: ModuleType) -> None:
    child, first = (subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(len(input()))"],
                                     stdin=subprocess.PIPE, text=True) for _ in range(2))  # fmt: skip
    launcher = fabric_part(home.__name__, "strategies.launchers.subprocess_script")
    launcher._ChildProcessObserver(first.pid, [child], sleep_period=0.05).start()
    kills: queue.Queue[Callable[[], None]] = queue.Queue()
    patches.kills_through(lambda kill: lambda: kills.put(kill))
    with child, first:
        child.communicate("x\n")
        kill = kills.get(timeout=60)
        assert first.poll() is None
        kill()
        assert first.wait() == -signal.SIGKILL


def test_only_methods_that_lightning_has_are_replaced(home: ModuleType) -> None:
    assert all(callable(getattr(home.strategies.Strategy, name)) for name in AROUND)


def test_module_and_states_stay_where_they_are(home: ModuleType, make_trainer: Make) -> None:
    trainer, module = make_trainer(home), regression(home)
    trainer.fit(module, loader(1))
    moved: list[str] = []
    optimizers = trainer.strategy.optimizers
    module.cpu = lambda: moved.append("module") or module
    trainer.strategy.connect(module)
    with patches.all_stays(trainer.strategy):
        trainer.strategy.teardown()
    assert moved == []
    assert trainer.strategy.optimizers is optimizers
    trainer.strategy.teardown()
    assert moved == ["module"]


def test_states_stay_where_an_optimizer_loads_them(home: ModuleType, make_trainer: Make) -> None:
    strategy_module = part(home.__name__, "strategies.strategy")
    stock = strategy_module._optimizer_to_device
    with patches.states_stay(home.__name__):
        strategy_module._optimizer_to_device(None, None)  # which the stock one would refuse
    assert strategy_module._optimizer_to_device is stock


def test_estimated_stepping_batches(home: ModuleType, make_trainer: Make) -> None:
    trainer = make_trainer(home, max_epochs=2)
    own = type(trainer)
    trainer.fit(regression(home), loader(3))
    with patches.stepping_batches(trainer, lambda trainer, stock: 10 * stock):
        assert trainer.estimated_stepping_batches == 10 * 3 * 2
        assert type(trainer).__name__ == "Trainer"
    assert trainer.estimated_stepping_batches == 3 * 2
    assert type(trainer) is own


def test_windows_begin_where_they_are_said_to(home: ModuleType, make_trainer: Make) -> None:
    stepped: list[int] = []
    zeroed: list[int] = []
    trainer, module = make_trainer(home, accumulate_grad_batches=3), regression(home)
    loop = trainer.fit_loop.epoch_loop
    module.on_before_optimizer_step = lambda optimizer: stepped.append(loop.batch_idx)
    module.optimizer_zero_grad = lambda epoch, batch_idx, optimizer: zeroed.append(batch_idx)
    own = set(vars(loop)), set(vars(loop.automatic_optimization))
    with patches.windows(trainer, lambda batch_idx: (batch_idx - 1) % 4):
        trainer.fit(module, loader(10))
    assert (zeroed, stepped) == ([1, 5, 9], [0, 4, 8, 9])  # with Lightning's they are [0, 3, 6, 9] and [2, 5, 8, 9]
    assert (set(vars(loop)), set(vars(loop.automatic_optimization))) == own


def test_clipping_ends_in_the_precision(home: ModuleType, make_trainer: Make) -> None:
    calls: list[Any] = []
    before = make_trainer(home).precision_plugin
    for by in ("norm", "value"):
        trainer = make_trainer(home, gradient_clip_val=0.5, gradient_clip_algorithm=by, max_steps=1)
        with patches.clipping(trainer.precision_plugin, noting(calls)):
            trainer.fit(regression(home), loader(1))
        assert [args[1:] for args in calls] == [(0.5, by)]
        assert vars(trainer.precision_plugin).keys() == vars(before).keys()
        calls.clear()
    assert trainer.lightning_module.net.head.weight.grad.abs().max() <= 0.5  # it has clipped


def test_nothing_is_clipped(home: ModuleType, make_trainer: Make) -> None:
    trainer = make_trainer(home, gradient_clip_val=1e-6, max_steps=1)
    with patches.without_clipping(trainer.precision_plugin):
        trainer.fit(regression(home), loader(1))
    assert "clip_gradients" not in vars(trainer.precision_plugin)
    assert trainer.lightning_module.net.head.weight.grad.abs().max() > 1e-6


def test_configure_model_builds_in_the_default_dtype(home: ModuleType, make_trainer: Make) -> None:
    kinds: list[torch.dtype] = []

    @contextmanager
    def in_fp32() -> Iterator[None]:  # inside Lightning's tensor_init_context, outside its module_init_context
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        yield
        torch.set_default_dtype(before)

    for patched in (True, False):
        trainer, module = make_trainer(home, precision="bf16-true", max_steps=1), regression(home)
        trainer.strategy.model_sharded_context = in_fp32
        module.configure_model = lambda: kinds.append(torch.nn.Linear(1, 1).weight.dtype)
        if patched:
            with patches.without_module_init_context(trainer.precision_plugin):
                trainer.fit(module, loader(1))
        else:
            trainer.fit(module, loader(1))
        assert "module_init_context" not in vars(trainer.precision_plugin)
    assert kinds == [torch.float32, torch.bfloat16]


def test_chosen_parameters_keep_their_type_in_the_conversion_to_a_precision(
    home: ModuleType, make_trainer: Make
) -> None:
    precision, module = make_trainer(home, precision="bf16-true").strategy.precision_plugin, regression(home)
    weight = module.net.head.weight.detach().clone()
    with patches.conversion_around(precision, lambda module: [module.net.head.weight]):
        assert precision.convert_module(module) is module
    types = {name: p.dtype for name, p in module.named_parameters()}
    assert torch.equal(module.net.head.weight, weight)
    assert types.pop("net.head.weight") is torch.float32
    assert set(types.values()) == {torch.bfloat16}
    assert "convert_module" not in vars(precision)


def test_checkpoint_that_is_being_loaded(home: ModuleType, make_trainer: Make, tmp_path: Path) -> None:
    loaded: list[Any] = []

    class Loads(home.Callback):  # type: ignore[name-defined,misc]
        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            loaded.append(patches.loaded_checkpoint(trainer) is checkpoint)

    trainer = make_trainer(home)
    trainer.fit(regression(home), loader(2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = make_trainer(home, callbacks=[Loads()], max_epochs=2)
    other.fit(regression(home), loader(2), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert loaded == [True]


def test_no_sampler_is_put_in(home: ModuleType, make_trainer: Make) -> None:
    trainer = make_trainer(home)
    connector = trainer._data_connector
    trainer.strategy.__class__ = type(
        "Several", (type(trainer.strategy),), {"distributed_sampler_kwargs": {"num_replicas": 1, "rank": 0}}
    )
    several = trainer._accelerator_connector
    assert several.use_distributed_sampler is True
    vars(several)["_is_distributed_for_test"] = True
    shuffled = torch.utils.data.DataLoader(range(4), shuffle=True)
    with patches.without_distributed_sampler(trainer):
        assert not connector._requires_distributed_sampler(shuffled)
        assert several.use_distributed_sampler is False
    assert several.use_distributed_sampler is True


def test_batches_on_their_way_to_the_device(home: ModuleType, make_trainer: Make) -> None:
    seen: list[bool] = []
    trainer, module = make_trainer(home, max_steps=1), regression(home)
    stock = module.training_step

    def step(batch: Any, batch_idx: int) -> Any:
        seen.append(bool((batch[1] == 7).all()))
        return stock(batch, batch_idx)

    module.training_step = step

    def sevens(move: Any) -> Any:
        return lambda *args, **kwargs: [torch.full_like(part, 7) for part in move(*args, **kwargs)]

    with patches.batches_through(trainer.strategy, sevens):
        trainer.fit(module, loader(1))
    assert seen == [True]
    assert "batch_to_device" not in vars(trainer.strategy)


def test_the_module_moves_within_a_context(home: ModuleType, make_trainer: Make) -> None:
    module, trainer, seen = regression(home), make_trainer(home, precision="bf16-true", max_steps=1), []

    @contextmanager
    def context() -> Iterator[None]:
        seen.append({p.dtype for p in module.parameters()})  # converted already
        seen.append(trainer.optimizers)
        module.net.head.weight.data.zero_()
        yield
        module.net.head.weight.data.add_(1)

    before = dict(vars(trainer.strategy))
    with patches.moves_within(trainer.strategy, context):
        trainer.fit(module, loader(1))
    assert seen == [{torch.bfloat16}, []]
    assert float(module.net.head.weight.detach().mean()) == pytest.approx(1, abs=0.1)
    assert vars(trainer.strategy).keys() - before.keys() <= {"_lightning_module"}


def test_checkpoints_are_read_through_a_function(home: ModuleType, make_trainer: Make, tmp_path: Path) -> None:
    trainer, path, calls = make_trainer(home), tmp_path / "saved.ckpt", []
    trainer.fit(regression(home), loader(2))
    trainer.save_checkpoint(path)
    trainer = make_trainer(home, max_epochs=2)

    def read(stock: Any) -> Any:
        return lambda source, *args, **kwargs: calls.append(source) or stock(source, *args, **kwargs)

    with patches.checkpoint_reads(trainer.strategy, read):
        trainer.fit(regression(home), loader(2), ckpt_path=path, weights_only=True)
    assert calls == [path]
    assert trainer.global_step == 4
    assert "load_checkpoint" not in vars(trainer.strategy)


@pytest.mark.parametrize("sized", [True, False])
def test_waits_for_batches(home: ModuleType, make_trainer: Make, sized: bool) -> None:
    calls: list[str] = []
    trainer = make_trainer(home, max_epochs=2)
    before = dict(vars(trainer.fit_loop.epoch_loop))
    data = loader(3) if sized else type("Stream", (), {"__iter__": lambda self: iter(list(loader(3)))})()

    def begin(*, with_epoch: bool = False) -> None:
        calls.append("epoch" if with_epoch else "begin")

    with patches.fetches(trainer, begin, lambda: calls.append("end")):
        trainer.fit(regression(home), data, loader(1))
    fetches = ["begin", "end"] * 3
    # of a loader without length the first batch of the first epoch comes before, and one wait ends with no batch
    epochs = [fetches, fetches] if sized else [fetches, [*fetches, "begin", "end"]]
    assert calls == ["epoch", *epochs[0], "epoch", *epochs[1]]
    assert vars(trainer.fit_loop.epoch_loop).keys() == before.keys()


def test_a_loss_for_itself_is_that_of_the_step_and_is_not_logged(home: ModuleType, make_trainer: Make) -> None:
    losses: list[Any] = []
    module = regression(home)
    stock = module.training_step

    def step(batch: Any, batch_idx: int) -> Any:
        loss = stock(batch, batch_idx)
        module.log("loss", loss)
        losses.append(loss)
        return loss

    module.training_step = step

    class Before(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            (batch,) = loader(1)
            patches.loss_of(trainer, batch, 0)
            assert not trainer._results
            assert (module._current_fx_name, trainer._logger_connector._current_fx) == ("on_train_start", None)

    trainer = make_trainer(home, max_steps=1, callbacks=[Before()])
    trainer.fit(module, loader(1))
    assert torch.equal(*losses)
    assert torch.equal(trainer.callback_metrics["loss"], losses[1].detach())


@pytest.mark.parametrize("factor", [1, 2])
def test_micro_batches_of_automatic_optimization(home: ModuleType, make_trainer: Make, factor: int) -> None:
    calls: list[Any] = []
    trainer = make_trainer(home, accumulate_grad_batches=factor)
    with patches.micro_batches(trainer, noting(calls)):
        trainer.fit(regression(home), loader(4))
    assert calls == [()] * 4
    assert trainer.global_step == 4 // factor
    assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)


@pytest.mark.parametrize("factor", [1, 2])
def test_gradients_are_zeroed_before_forward(home: ModuleType, make_trainer: Make, factor: int) -> None:
    trainer, module = make_trainer(home, accumulate_grad_batches=factor), regression(home)
    step, calls = module.training_step, list[str]()
    module.on_before_zero_grad = lambda optimizer: calls.append("zero")
    module.training_step = lambda *args: calls.append("forward") or step(*args)
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    with patches.zeroing_first(trainer):
        trainer.fit(module, loader(4))
    assert calls == ["zero", *["forward"] * factor] * (4 // factor)
    assert loop.optim_progress.optimizer.zero_grad.total.completed == 4 // factor
    assert "_make_closure" not in vars(loop)


def test_hooks_run_after_a_closure(home: ModuleType, make_trainer: Make) -> None:
    calls: list[str] = []
    trainer, module = make_trainer(home, max_steps=1), regression(home)
    module.on_before_optimizer_step = lambda optimizer: calls.append("hook")
    own = trainer.strategy.optimizer_step

    def step(optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        behind = patches.with_hooks(trainer.precision_plugin, module, optimizer, closure)
        calls.append("before")
        loss = behind()
        assert loss > 0
        return loss

    with replaced(trainer.strategy, "optimizer_step", step):
        trainer.fit(module, loader(1))
    assert calls == ["before", "hook"]
    assert trainer.strategy.optimizer_step == own


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("ends", [True, False])
def test_resumed_run_logs_each_step_once(home: ModuleType, make_trainer: Make, tmp_path: Path, ends: bool) -> None:
    steps: list[int] = []

    def fit(max_steps: int, ckpt_path: str | None) -> None:
        callback = home.callbacks.LambdaCallback(
            on_train_batch_start=patches.correct_logged_steps,
            on_train_batch_end=lambda trainer, *_: steps.append(patches.stepped_batches(trainer)),
            on_train_end=lambda trainer, _: trainer.save_checkpoint(tmp_path / "last.ckpt"),
            on_exception=lambda trainer, *_: trainer.save_checkpoint(tmp_path / "last.ckpt"),
        )
        trainer = make_trainer(home, max_epochs=2, max_steps=max_steps, val_check_interval=2, callbacks=[callback])
        module = regression(home)
        if not ends and ckpt_path is None:
            step = module.training_step
            module.training_step = lambda batch, index: step(batch, index) if index < 2 else step(None, index)
        trainer.fit(module, loader(8), loader(1), ckpt_path=ckpt_path)

    with nullcontext() if ends else pytest.raises(TypeError):
        fit(2, None) if ends else fit(8, None)
    fit(6, str(tmp_path / "last.ckpt"))
    assert steps == [0, 1, 2, 3, 4, 5]


PATCHES = re.compile(
    r"(trainer|strategy|precision|precision_plugin|loop)\.__class__ = |setattr\((trainer|strategy|precision_plugin)\b"
    r"|vars\([\w.]*(precision_plugin|strategy|trainer)\)|_accelerator_connector|_make_closure|_wrap_closure"
    r"|replaced\([\w.]*(trainer|strategy|precision|precision_plugin|loop), "
    r"|(strategy|precision_plugin|precision)\.(setup|backward|clip_gradients|batch_to_device|training_step) = "
)


def test_a_skipped_batch_steps_no_scheduler_and_is_not_counted(home: ModuleType, make_trainer: Make) -> None:
    trainer, module, skipped = make_trainer(home), regression(home), []
    loop, seen = trainer.fit_loop.epoch_loop, []

    def configure_optimizers() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]

    def around(stock: Any, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        skipped[:] = [True] if batch_idx == 1 else []
        seen.append(batch_idx)
        return {} if skipped else stock(optimizer, batch_idx, kwargs)

    module.configure_optimizers = configure_optimizers
    own = set(vars(loop)), set(vars(loop.automatic_optimization))
    with patches.guarded_batches(trainer, around, lambda: bool(skipped)):
        trainer.fit(module, loader(3))
    assert seen == [0, 1, 2]
    assert trainer.global_step == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25
    assert (set(vars(loop)), set(vars(loop.automatic_optimization))) == own


def test_looks_before_updates_and_norms_that_clipping_computes(home: ModuleType, make_trainer: Make) -> None:
    trainer, module, calls = make_trainer(home, gradient_clip_val=0.1), regression(home), []
    module.on_before_optimizer_step = lambda optimizer: calls.append("hook")
    precision = trainer.strategy.precision_plugin
    with (
        patches.before_updates(precision, lambda optimizer: calls.append(type(optimizer).__name__)),
        patches.clipped_norms(precision, lambda optimizer, norm: calls.append(float(norm) > 0.1)),
        patches.steps_through(
            trainer.strategy, lambda stock, *args, **kwargs: calls.append("step") or stock(*args, **kwargs)
        ),
    ):
        trainer.fit(module, loader(1))
    assert calls == ["step", "hook", True, "AdamW"]
    assert "_after_closure" not in vars(precision)
    assert "clip_grad_by_norm" not in vars(precision)
    assert patches.scaler_of(precision) is None
    assert patches.engine_left_out(trainer.strategy) is None


def test_saves_are_noted_or_refused(home: ModuleType, make_trainer: Make, tmp_path: Path) -> None:
    trainer, noted, refused = make_trainer(home), [], []
    trainer.fit(regression(home), loader(1))
    with patches.saves_noted(trainer.strategy, noted.append):
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        with patches.saves_refused(trainer, refused.append):
            trainer.save_checkpoint(tmp_path / "two.ckpt")
    assert noted == [tmp_path / "one.ckpt"]
    assert refused == [False]
    assert not (tmp_path / "two.ckpt").exists()


def test_a_scaler_unscales_again_after_a_step_that_was_left_out(home: ModuleType) -> None:
    precision = home.plugins.MixedPrecision("16-mixed", "cpu")
    scaler, weight = patches.scaler_of(precision), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        patches.forget_unscaling(precision, optimizer)
    with pytest.raises(AssertionError):  # it knows nothing of the optimizer
        scaler.update()


def test_empty_hooks_of_each_batch_are_left_out(home: ModuleType, make_trainer: Make) -> None:
    class Base(home.Callback):  # type: ignore[name-defined,misc]
        pass

    class Looks(Base):  # type: ignore[misc,valid-type]
        calls = 0

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            self.calls += 1

    looks, profiler = Looks(), home.profilers.SimpleProfiler()
    with patches.empty_hooks_left_out(looks, Base):
        make_trainer(home, callbacks=[looks], profiler=profiler).fit(regression(home), loader(1))
    assert looks.calls
    called = {name.rpartition(".")[2] for name in profiler.recorded_durations if "Looks." in name}
    assert called & {*patches.BATCH_HOOKS} == {"on_after_backward"}
    assert not {*vars(looks)} & {*patches.BATCH_HOOKS}


def test_something_happens_around_each_hook(home: ModuleType, make_trainer: Make) -> None:
    found: list[str] = []

    class Notes(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, *_: Any) -> None:
            found.append("callback")

    @contextmanager
    def within(hook: str) -> Iterator[None]:
        found.append(hook)
        yield
        found.append(f"after {hook}")

    trainer, module = make_trainer(home, callbacks=[Notes()]), regression(home)
    module.on_train_batch_end = lambda *_: found.append("module")
    with patches.around_hooks(trainer, home.__name__, within):
        trainer.fit(module, loader(2))
        make_trainer(home).fit(regression(home), loader(3))  # another Trainer's
    end = "on_train_batch_end"
    wanted = [end, "callback", f"after {end}", end, "module", f"after {end}"]
    first = found.index(end)
    assert found[first : first + 6] == wanted
    assert [each for each in found if each in wanted] == 2 * wanted
    assert {"on_train_batch_start", "lr_scheduler_step", "optimizer_step", "on_after_batch_transfer"} - {*found} == {
        "lr_scheduler_step"
    }
    make_trainer(home).fit(regression(home), loader(1))
    assert len([each for each in found if each in wanted]) == 12


def test_nobody_else_patches_lightning() -> None:
    package = Path(patches.__file__).parents[1]
    found = {path for path in package.rglob("*.py") if PATCHES.search(path.read_text(encoding="utf-8"))}
    assert found == {Path(patches.__file__), Path(resuming.__file__)}
