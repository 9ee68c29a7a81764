"""Throughput: right figures from a clock under the test's control, and a training that does not notice."""

from __future__ import annotations

import importlib.machinery
import sys
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader

from lightning_solo.data.batch_size import size_of
from lightning_solo.errors import PresetError
from lightning_solo.techniques.micro_batching.technique import MicroBatching
from lightning_solo.techniques.throughput import flops, rates, technique
from lightning_solo.techniques.throughput.flops import CountedOnce, compute_dtype
from lightning_solo.techniques.throughput.nvml import GpuState
from lightning_solo.techniques.throughput.technique import Throughput
from tests.messages import mentions
from tests.modules import loader, regression
from tests.techniques.test_memory_logger import recording_logger

pytestmark = pytest.mark.any_device


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that stands still; yields the function that moves it."""
    now = [100.0]

    class Time:
        @staticmethod
        def perf_counter() -> float:
            return now[0]

    monkeypatch.setattr(rates, "time", Time)

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def timed(home: Any, advance: Any, train_s: float = 0.5, validation_s: float = 0.0, net: Any = None) -> Any:
    """Return a module whose every training and validation step takes so many seconds of the clock."""
    module = regression(home, net)
    training_step, validation_step = module.training_step, module.validation_step
    module.training_step = lambda batch, batch_idx: (advance(train_s), training_step(batch, batch_idx))[1]
    module.validation_step = lambda batch, batch_idx: (advance(validation_s), validation_step(batch, batch_idx))[1]
    return module


def tokens(batches: int, batch: int = 2, length: int = 6) -> DataLoader[Any]:
    data = [{"input_ids": torch.zeros(batch, length, dtype=torch.long)} for _ in range(batches)]
    return DataLoader(data, batch_size=None)


def language_model(home: Any, advance: Any) -> Any:
    embedding, head = nn.Embedding(11, 4), nn.Linear(4, 11)
    module = regression(home, nn.Sequential(embedding, head))

    def training_step(batch: Any, batch_idx: int) -> Any:
        advance(0.25)
        return nn.functional.cross_entropy(module.net(batch["input_ids"]).flatten(0, 1), batch["input_ids"].flatten())

    module.training_step = training_step
    return module


# --- acted ---


def test_samples_per_second_are_logged_to_every_logger(
    home: Any, make_trainer: Any, clock: Any, device: torch.device
) -> None:
    loggers, callback = [recording_logger(home), recording_logger(home)], Throughput(every_n_steps=4, window_size=3)
    trainer = make_trainer(home, logger=loggers, log_every_n_steps=1, callbacks=[callback])
    trainer.fit(timed(home, clock), loader(10, batch_size=4))
    for logger in loggers:
        ours = [(step, metrics) for step, metrics in logger.seen if any("throughput/" in key for key in metrics)]
        assert [step for step, _ in ours] == [3, 7, 10]
        assert all(metrics["throughput/samples_per_s"] == 4 / 0.5 for _, metrics in ours)
        names = {"throughput/samples_per_s", "throughput/model_tflops_per_s", "throughput/step_s"}
        state = set[str]()
        if device.type == "cuda":
            names.add("throughput/mfu")  # of a device that the table knows
            state = {f"throughput/{name}" for name in ("utilization", "throttled", "throttled_by_power")}
            state.add("throughput/throttled_by_heat")  # where NVML answers
        assert all(names <= set(metrics) <= names | state for _, metrics in ours)
    assert callback.figures["throughput/samples_per_s"] == 8.0


@pytest.mark.parametrize(
    ("callback", "seconds"),
    [(Throughput(), [40.0, 0.5, 0.5]), (Throughput(window_size=3), [0.5, 40.0, 40.0, 0.5, 0.5])],
)
def test_rates_leave_out_the_first_batch_and_those_before_the_window(
    home: Any, make_trainer: Any, clock: Any, callback: Throughput, seconds: list[float]
) -> None:
    seconds = list(seconds)
    module = timed(home, lambda _: clock(seconds.pop(0)))
    make_trainer(home, callbacks=[callback]).fit(module, loader(len(seconds), batch_size=4))
    assert callback.figures["throughput/samples_per_s"] == 8.0  # batches of 4 in 0.5 s


def step_times(logger: Any) -> list[tuple[int, float]]:
    return [(step, metrics["throughput/step_s"]) for step, metrics in logger.seen if "throughput/step_s" in metrics]


def test_seconds_per_step_since_the_log_before(home: Any, make_trainer: Any, clock: Any) -> None:
    logger, seconds = recording_logger(home), [40.0, 0.5, 0.5, 0.5, 0.5, 9.5, 0.5, 0.5, 0.5, 0.5]
    callback, train = Throughput(every_n_steps=4, window_size=2), lambda _: clock(seconds.pop(0))
    trainer = make_trainer(home, logger=logger, log_every_n_steps=1, val_check_interval=3, callbacks=[callback])
    module = timed(home, train)
    module.validation_step = lambda batch, batch_idx: clock(1000.0)
    trainer.fit(module, loader(10), loader(1))
    # steps 2 to 4 of 0.5 s, the first aside; steps 5 to 8, of which one took 9.5 s; steps 9 and 10
    assert step_times(logger) == [(3, 0.5), (7, (3 * 0.5 + 9.5) / 4), (10, 0.5)]


def test_a_step_of_several_batches_takes_the_time_of_all(home: Any, make_trainer: Any, clock: Any) -> None:
    logger, callback = recording_logger(home), Throughput(every_n_steps=1)
    trainer = make_trainer(home, logger=logger, log_every_n_steps=1, accumulate_grad_batches=2, callbacks=[callback])
    trainer.fit(timed(home, clock), loader(6))
    assert step_times(logger) == [(1, 1.0), (2, 1.0)]  # none of the first


def test_tokens_and_model_flops(home: Any, make_trainer: Any, clock: Any) -> None:
    callback = Throughput(device_tflops=1e-9)
    make_trainer(home, callbacks=[callback]).fit(language_model(home, clock), tokens(4))
    # head: 12 tokens x 4 wide x 11 out, 2 FLOPs each; x 3 for forward and backward; in 0.25 s
    flops_per_s = 3 * 2 * 12 * 4 * 11 / 0.25
    assert callback.figures == pytest.approx(
        {
            "throughput/samples_per_s": 2 / 0.25,
            "throughput/tokens_per_s": 12 / 0.25,
            "throughput/model_tflops_per_s": flops_per_s / 1e12,
            "throughput/mfu": flops_per_s / 1e3,
        }
    )


def test_flops_scale_with_the_batch(home: Any, make_trainer: Any, clock: Any) -> None:
    data = [(torch.randn(size, 8), torch.randn(size, 1)) for size in (2, 4, 4, 6)]
    callback = Throughput()
    make_trainer(home, callbacks=[callback]).fit(
        timed(home, clock, net=nn.Linear(8, 1)), DataLoader(data, batch_size=None)
    )
    # 14 samples in 1.5 s after the first batch; 8 x 1 products of 2 FLOPs, 3 times
    assert callback.figures["throughput/model_tflops_per_s"] * 1e12 == pytest.approx(14 * 3 * 2 * 8 / 1.5)


def test_recomputation_is_not_counted(home: Any, make_trainer: Any, clock: Any) -> None:
    figures = []
    for recompute in (False, True):
        net, callback = nn.Linear(8, 1), Throughput()
        module = timed(home, clock, net=net)
        if recompute:
            module.step = lambda batch, net=net: (
                (torch.utils.checkpoint.checkpoint(net, batch[0], use_reentrant=False) - batch[1]).square().mean()
            )
        make_trainer(home, callbacks=[callback]).fit(module, loader(3))
        figures.append(callback.figures)
    assert figures[0] == figures[1]
    assert figures[0]["throughput/model_tflops_per_s"] > 0


def test_manual_optimization_is_counted_with_backward(home: Any, make_trainer: Any, clock: Any) -> None:
    module, callback = regression(home, nn.Linear(8, 1)), Throughput()
    module.automatic_optimization = False

    def training_step(batch: Any, batch_idx: int) -> None:
        clock(0.5)
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.step(batch))
        optimizer.step()

    module.training_step = training_step
    make_trainer(home, callbacks=[callback]).fit(module, loader(3, batch_size=4))
    # forward and the weight's gradient, 2 x 8 x 1 FLOPs a sample each; the input needs no gradient
    assert callback.figures["throughput/model_tflops_per_s"] * 1e12 == pytest.approx(2 * 2 * 8 * 4 / 0.5)


def test_validation_is_not_training_time(home: Any, make_trainer: Any, clock: Any) -> None:
    class Slow(home.Callback):  # type: ignore[name-defined,misc]
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            clock(1000.0)  # as writing a checkpoint would

    callback = Throughput(window_size=50)
    trainer = make_trainer(home, max_epochs=2, val_check_interval=3, callbacks=[callback, Slow()])
    trainer.fit(timed(home, clock, 0.5, 100.0), loader(10, batch_size=4), loader(2))
    assert callback.figures["throughput/samples_per_s"] == 8.0


def test_waiting_for_data_is_training_time(home: Any, make_trainer: Any, clock: Any) -> None:
    class Slow(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            clock(0.5)
            return torch.randn(4, 8), torch.randn(4, 1)

    callback = Throughput()
    make_trainer(home, callbacks=[callback]).fit(timed(home, clock), DataLoader(Slow(), batch_size=None))
    assert callback.figures["throughput/samples_per_s"] == 4.0  # 4 samples in 0.5 + 0.5 s


def test_sizes_by_argument(home: Any, make_trainer: Any, clock: Any) -> None:
    callback = Throughput(samples_per_batch=3, tokens_per_batch=30)
    make_trainer(home, callbacks=[callback]).fit(timed(home, clock), loader(4))
    assert callback.figures["throughput/samples_per_s"] == 6.0
    assert callback.figures["throughput/tokens_per_s"] == 60.0


def test_batch_without_tensors_warns_once(home: Any, make_trainer: Any) -> None:
    module = regression(home)
    module.training_step = lambda batch, batch_idx: module.net(torch.ones(2, 8, device=module.device)).mean()
    callback, logger = Throughput(), recording_logger(home)
    trainer = make_trainer(home, logger=logger, log_every_n_steps=1, callbacks=[callback])
    with pytest.warns(UserWarning, match=mentions("step_s", "write callback.throughput.samples_per_batch")) as caught:
        trainer.fit(module, DataLoader(["a", "b", "c"], batch_size=None))
    assert len([w for w in caught if "samples_per_batch" in str(w.message)]) == 1
    assert callback.figures == {}
    assert len(step_times(logger)) == 1


def test_sizes_of_batches() -> None:
    ids = torch.zeros(4, 128, dtype=torch.int32)
    assert size_of(ids) == (4, 512)
    assert size_of({"a": "text", "b": [torch.tensor(1.0), (torch.zeros(3, 2, 2), ids)]}) == (3, None)
    assert size_of(torch.zeros(4, 128, dtype=torch.bool)) == (4, None)
    assert size_of({"a": torch.tensor(1)}) == (None, None)


def test_the_type_of_a_precision() -> None:
    names = ["bf16-mixed", "bf16-true", "16-mixed", "64-true", "32-true", "transformer-engine", "None"]
    types = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float64, torch.float32, torch.int8, torch.float32]
    assert [compute_dtype(name) for name in names] == types


@pytest.mark.cpu_only("of a GPU the package has a table, and doesn't ask Lightning")
def test_a_known_device_gives_utilisation(home: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(flops, "get_available_flops", lambda device, dtype: asked.append((device, dtype)) or 1e9)
    callback = Throughput()
    make_trainer(home, precision="bf16-mixed", callbacks=[callback]).fit(regression(home), loader(4))
    assert asked == [(torch.device("cpu"), torch.bfloat16)]
    assert callback.figures["throughput/mfu"] > 0


@pytest.mark.parametrize(
    ("name", "dtype", "precision", "tflops"),
    [
        ("NVIDIA H200", torch.bfloat16, "highest", 989.4),  # which Lightning's table lacks, and warns
        ("NVIDIA H200", torch.float32, "highest", 66.9),
        ("NVIDIA H200", torch.float32, "high", 494.7),
        ("Tesla T4", torch.float16, "highest", 65.0),
        ("Tesla T4", torch.bfloat16, "highest", None),
        ("Tesla T4", torch.float32, "high", 8.1),  # which has no TF32
    ],
)
def test_devices_of_our_own_table(
    name: str, dtype: torch.dtype, precision: str, tflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    peak = flops.peak_flops(torch.device("cuda"), dtype)
    assert peak == (tflops and pytest.approx(tflops * 1e12))


def test_fewer_tokens_than_samples_are_refused(home: Any, make_trainer: Any) -> None:
    with pytest.raises(PresetError, match=mentions("tokens_per_batch=3", "4 samples")):
        make_trainer(home, callbacks=[Throughput(tokens_per_batch=3)]).fit(regression(home), loader(2))


@pytest.mark.parametrize("tflops", [0, float("nan"), float("inf"), True])
def test_device_tflops_that_are_no_rate_are_refused(tflops: Any) -> None:
    with pytest.raises(PresetError, match=r"throughput\.device_tflops=.*(expected|allowed)"):
        Throughput(device_tflops=tflops)


# --- cost ---


def test_compiled_modules_are_still_compiled(home: Any, make_trainer: Any) -> None:
    import torch._dynamo

    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    torch._dynamo.reset()
    net = nn.Linear(8, 1)
    module = regression(home, net)
    function = torch.compile(lambda x: net(x), backend=backend)
    module.step = lambda batch: nn.functional.mse_loss(function(batch[0]), batch[1])
    callback = Throughput()
    make_trainer(home, callbacks=[callback]).fit(module, loader(4))
    assert compiled == [1]
    assert callback.figures["throughput/model_tflops_per_s"] > 0
    torch._dynamo.reset()


def test_never_synchronises(home: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: calls.append(1))
    make_trainer(home, callbacks=[Throughput(every_n_steps=1)]).fit(regression(home), loader(9))
    assert calls == []


def test_only_one_forward_runs_under_the_counter(home: Any, make_trainer: Any) -> None:
    modes: list[int] = []
    module = regression(home)
    stock = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        modes.append(len(_get_current_dispatch_mode_stack()))
        return stock(batch, batch_idx)

    module.training_step = training_step
    module.on_after_backward = lambda: modes.append(-len(_get_current_dispatch_mode_stack()))
    make_trainer(home, callbacks=[Throughput()]).fit(module, loader(3))
    assert modes == [1, 0, 0, 0, 0, 0]
    modes.clear()
    make_trainer(home, callbacks=[Throughput(count_flops=False)]).fit(module, loader(3))
    assert modes == [0] * 6


@pytest.mark.gpu
def test_figures_on_a_gpu(home: Any, make_trainer: Any) -> None:
    callback = Throughput()
    started = time.perf_counter()
    make_trainer(home, accelerator="gpu", callbacks=[callback]).fit(regression(home), loader(50, batch_size=4))
    assert callback.figures["throughput/samples_per_s"] > 200 / (time.perf_counter() - started)
    assert 0 < callback.figures["throughput/mfu"] < 1


# --- trace ---


def fails(*args: Any) -> None:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("hook", "function", "ends"),
    [
        ("on_after_backward", lambda: None, nullcontext()),
        ("on_train_batch_start", lambda batch, batch_idx: -1, nullcontext()),  # Lightning's way to skip an epoch
        ("on_train_batch_start", fails, pytest.raises(RuntimeError, match="broken")),
        ("training_step", fails, pytest.raises(RuntimeError, match="broken")),
    ],
)
def test_counter_is_removed_after_every_fit(home: Any, make_trainer: Any, hook: str, function: Any, ends: Any) -> None:
    callback, module = Throughput(), regression(home)
    trainer, stock = make_trainer(home, callbacks=[callback]), getattr(module, hook)
    setattr(module, hook, function)
    with ends:
        trainer.fit(module, loader(4))
    assert _get_current_dispatch_mode_stack() == []
    assert "training_step" not in vars(trainer.strategy)
    callback.teardown(trainer, module, "fit")
    callback.on_exception(trainer, module, RuntimeError())
    setattr(module, hook, stock)
    make_trainer(home, callbacks=[callback]).fit(module, loader(4))
    assert callback.figures["throughput/samples_per_s"] > 0


def test_method_of_another_technique_is_restored() -> None:
    class Strategy:
        def training_step(self) -> str:
            return "stock"

    strategy, counts = Strategy(), []
    strategy.training_step = own = lambda: "own"  # type: ignore[method-assign]
    CountedOnce(strategy, "training_step", counts.append)
    assert strategy.training_step() == "own"
    assert strategy.training_step is own
    assert counts == [0]
    once = CountedOnce(strategy, "training_step", counts.append)
    strategy.training_step = wrapped = lambda: f"wrapped {once()}"  # type: ignore[method-assign]
    assert strategy.training_step() == strategy.training_step() == "wrapped own"
    assert strategy.training_step is wrapped
    assert len(counts) == 2


def test_dynamo_is_not_imported_for_the_count() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "torch._dynamo", raising=False)
        with flops.eager_flop_counter() as counter:
            torch.ones(2, 3) @ torch.ones(3, 4)
        assert "torch._dynamo" not in sys.modules
    assert counter.get_total_flops() == 2 * 2 * 3 * 4


# --- a GPU's state ---


class Nvml(types.ModuleType):
    """The functions of nvidia-ml-py that are called, by its names: there is no NVIDIA driver here."""

    class NVMLError(Exception):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801, N818
        pass

    def __init__(self, reasons: int, gpu: int = 75, fails: str = "") -> None:
        super().__init__("pynvml")
        self.calls: list[str] = []
        self.reasons, self.gpu, self.fails = reasons, gpu, fails
        self.__spec__ = importlib.machinery.ModuleSpec("pynvml", None)

    def _called(self, name: str, result: Any = None) -> Any:
        self.calls.append(name)
        if name == self.fails:
            raise self.NVMLError("Not Supported")
        return result

    def nvmlInit(self) -> None:
        self._called("init")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return self._called("handle", 40 + index)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        assert handle == 40
        return self._called("utilization", types.SimpleNamespace(gpu=self.gpu, memory=1))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        assert handle == 40
        return self._called("reasons", self.reasons)


def asked(monkeypatch: pytest.MonkeyPatch, module: Nvml) -> GpuState:
    """Return the state of a GPU that answers by a module."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", True)
    monkeypatch.setattr(torch.cuda, "pynvml", module, raising=False)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda device: torch.device(device).index)
    return GpuState(torch.device("cuda:0"))


@pytest.mark.not_simulated("the simulated device answers for torch.cuda.utilization")
@pytest.mark.parametrize(
    ("reasons", "throttled"),
    [
        (0x0, (0, 0, 0)),
        (0x1 | 0x2, (0, 0, 0)),
        (0x4, (1, 1, 0)),
        (0x20, (1, 0, 1)),
        (0xC8, (1, 1, 1)),
        (0x8, (1, 0, 0)),
    ],
)
def test_utilisation_and_throttling_are_read_from_nvml(
    monkeypatch: pytest.MonkeyPatch, reasons: int, throttled: tuple[int, ...]
) -> None:
    names = ("throttled", "throttled_by_power", "throttled_by_heat")
    assert asked(monkeypatch, Nvml(reasons)).figures() == {
        "throughput/utilization": 0.75,
        **{f"throughput/{name}": float(value) for name, value in zip(names, throttled, strict=True)},
    }


@pytest.mark.not_simulated("the simulated device answers for torch.cuda.utilization")
@pytest.mark.parametrize("fails", ["init", "utilization", "reasons"])
def test_gpu_that_cannot_tell_is_asked_once(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    module = Nvml(0, fails=fails)
    state = asked(monkeypatch, module)
    assert state.figures() == {}
    calls = len(module.calls)
    assert calls > 0
    assert state.figures() == {}
    assert len(module.calls) == calls


def test_no_gpu_or_no_package_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Nvml(0x4)
    asked(monkeypatch, module)
    assert GpuState(torch.device("cpu")).figures() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuState(torch.device("cuda:0")).figures() == {}
    assert module.calls == []


@pytest.mark.not_simulated("the simulated device answers for torch.cuda.utilization")
def test_state_of_the_gpu_is_logged(home: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, Nvml(0x4))
    monkeypatch.setattr(technique, "GpuState", lambda device: GpuState(torch.device("cuda:0")))
    logger = recording_logger(home)
    callback = Throughput(every_n_steps=2)
    make_trainer(home, logger=logger, log_every_n_steps=1, callbacks=[callback]).fit(regression(home), loader(4))
    logged = [metrics for _, metrics in logger.seen if "throughput/utilization" in metrics]
    assert [metrics["throughput/throttled_by_power"] for metrics in logged] == [1.0] * 2


@pytest.mark.parametrize("micro_batch", [2, 1])
def test_flops_of_a_batch_that_is_split_are_those_of_all_its_parts(
    make_trainer: Callable[..., Any], micro_batch: int
) -> None:
    def flops(*callbacks: Any) -> int:
        callback = Throughput()
        make_trainer(L, callbacks=[callback, *callbacks]).fit(regression(L), loader(3))
        counted = callback._rates.totals[-1].flops
        assert counted
        return counted

    assert flops(MicroBatching(micro_batch, check=False)) == flops()
