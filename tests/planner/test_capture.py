"""Two steps without data hold what two real ones hold, byte by byte."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_solo.errors import PlanError
from lightning_solo.memory import host_slabs
from lightning_solo.memory.ledger import storages_of
from lightning_solo.optim import compressed_moments
from lightning_solo.optim.adamw_states import bytes_of, state_layout
from lightning_solo.optim.muon import MuonAdamW
from lightning_solo.optim.one_by_one import AdamW8bit, Lion
from lightning_solo.optim.schedule_free import ScheduleFreeAdamW
from lightning_solo.optim.torch_optimizers import ONE_BY_ONE, SERVED
from lightning_solo.planner import capture as capture_module
from lightning_solo.planner.capture import Trace, _collected_at_steps, capture
from lightning_solo.planner.fake_modules import fake_mode, known_numbers
from lightning_solo.planner.rules import arrange
from lightning_solo.planner.tracer import Tracer
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.compact_states import states as compact_states
from tests.conftest import long
from tests.messages import mentions
from tests.planner.modules import MODULES, Classifier, vectors

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped_window": {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
}


def both(make: Any, batch: Any, arguments: Any) -> tuple[Trace, Trace]:
    """Return (fake, real), by the CPU's own rules."""
    made = []
    for fake in (True, False):
        torch.manual_seed(0)
        made.append(capture(make, batch, arguments(), fake=fake, cuda=False))
    return made[0], made[1]


def assert_equal(fake: Trace, real: Trace) -> None:
    (fake_peak, fake_where), (real_peak, real_where) = fake.log.peak(), real.log.peak()
    assert fake_peak == real_peak > 0
    assert fake.log.breakdown(fake_where) == real.log.breakdown(real_where)


def named(choices: Any) -> list[Any]:
    """Cases by name; those whose sizes others have too, or that cross what others have, are for `make test-all`."""
    left = ({"bf16-true"}, {"32-true", "clipped_window"}, {"bf16-mixed", "plain"})
    kept = {"attending", "two_optimizers", "gated"}  # three kinds of modules stand for all
    marks = [
        pytest.mark.long if any(choice >= some for some in left) or not choice & kept else ()
        for choice in map(set, choices)
    ]
    return [pytest.param(*choice, id="-".join(choice), marks=mark) for choice, mark in zip(choices, marks, strict=True)]


# Lightning neither accumulates nor clips where optimization is by hand
COMBINATIONS = [
    (name, precision, extra)
    for name, precision, extra in itertools.product(MODULES, PRECISIONS, ARGUMENTS)
    if name != "recurrent" and (name, extra) != ("two_optimizers", "clipped_window")
]


@pytest.mark.parametrize(("name", "precision", "extra"), named(COMBINATIONS))
def test_fake_steps_hold_what_real_steps_hold(name: str, precision: str, extra: str) -> None:
    make, batch = MODULES[name]
    assert_equal(*both(make, batch(), lambda: {"precision": precision, **ARGUMENTS[extra]}))


@pytest.mark.long
def test_clipping_by_value() -> None:
    arguments = {"precision": "bf16-mixed", "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    assert_equal(*both(MODULES["attending"][0], MODULES["attending"][1](), lambda: arguments))


# --- compact model states, as the preset attaches them ---


@pytest.mark.parametrize(
    ("name", "precision", "extra"),
    named([*itertools.product(("attending", "convolutional", "tied"), ("bf16-mixed", "bf16-true"), ARGUMENTS)]),
)
def test_compact_states_equal_real_ones(name: str, precision: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_moments, "LEAST", 64)  # the modules are small
    make, batch = MODULES[name]
    arranged = arrange(compose("compact", [f"precision={precision}"]), {})
    fake, real = both(make, batch(), lambda: {**arranged.arguments(), **ARGUMENTS[extra]})
    assert_equal(fake, real)
    breakdown = fake.log.breakdown(len(fake.log.events) - 1)
    assert breakdown["optimizer_states"] < 2 * breakdown["weights"]  # of moments in fp32 and corrections 4.5


@pytest.mark.parametrize("extra", [long("plain"), "clipped_window"])
def test_states_on_the_host_equal_real_ones(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_moments, "LEAST", 64)
    make, batch = MODULES["attending"]
    arranged = arrange(compose("compact_host"), {})
    assert_equal(*both(make, batch(), lambda: {**arranged.arguments(), **ARGUMENTS[extra]}))


@pytest.mark.parametrize("preset", ["compact_host", long("compact")])
def test_host_memory_of_this_machine_limits_no_plan(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (compact_states, host_slabs):
        monkeypatch.setattr(room, "host_memory", lambda: (2**30, 100))
    make, batch = MODULES["attending"]
    assert capture(make, batch(), arrange(compose(preset), {}).arguments(), cuda=True).log.peak()[0] > 0


@pytest.mark.long
def test_states_on_the_host_are_not_counted_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_moments, "LEAST", 64)
    make, batch = MODULES["attending"]
    traces = {
        preset: capture(make, batch(), arrange(compose(preset), {}).arguments(), cuda=True)
        for preset in ("compact", "compact_host")
    }
    on_host = traces["compact_host"].host_bytes
    large = [p.bfloat16() for p in make().parameters() if p.numel() >= 64]
    assert on_host == sum(bytes_of(state_layout(p, 24, 8)) for p in large) > 0
    assert traces["compact"].host_bytes == 0
    resident = {name: trace.log.breakdown(len(trace.log.events) - 1) for name, trace in traces.items()}
    assert resident["compact"]["optimizer_states"] - resident["compact_host"]["optimizer_states"] == on_host


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if name == "SGD" else long(name) for name in ONE_BY_ONE if name not in ("Adam", "AdamW")]
)
@pytest.mark.parametrize("extra", [long("plain"), "clipped_window"])
def test_split_masters_of_other_optimizers_equal_real_ones(name: str, extra: str) -> None:
    make, batch = MODULES["dense"]

    def with_optimizer() -> Any:
        module = make()
        module.optimizer = dict(zip(ONE_BY_ONE, SERVED, strict=True))[name]
        return module

    arranged = arrange(compose("compact"), {})
    fake, real = both(with_optimizer, batch(), lambda: {**arranged.arguments(), **ARGUMENTS[extra]})
    assert_equal(fake, real)


def test_kernels_of_another_library_are_refused() -> None:
    said = r"back_end=torchao_8bit: .* can't be traced; plan callback\.compact_states\.back_end=own with .*bits=16-st"
    with pytest.raises(PlanError, match=said):
        arrange(compose("compact", ["callback.compact_states.back_end=torchao_8bit"]), {})


# --- activation checkpointing, as the preset attaches it ---

BLOCKS = {
    "dense": "[Linear]",
    "convolutional": "[Conv2d]",
    "attending": "auto",
    "tied": "[Linear]",
    "with_metrics": "[Linear]",
    "two_optimizers": "[Linear]",
    "gated": "[GRU]",
}


def recomputing(name: str, precision: str) -> Callable[[], dict[str, Any]]:
    """Return what makes the arguments of a Trainer with the preset `checkpointing`, arranged as for a plan."""
    overrides = [f"precision={precision}", f"callback.activation_checkpointing.blocks={BLOCKS[name]}"]
    return arrange(compose("checkpointing", overrides), {}).arguments


IN_TURN = list(zip(BLOCKS, itertools.cycle(PRECISIONS[:2]), strict=False))


@pytest.mark.parametrize(
    ("name", "precision"),
    [choice if choice in IN_TURN[:1] else long(*choice) for choice in itertools.product(BLOCKS, PRECISIONS)],
)
def test_recomputing_fake_steps_equal_real_steps(name: str, precision: str) -> None:
    make, batch = MODULES[name]
    assert_equal(*both(make, batch(), recomputing(name, precision)))


def test_blocks_are_really_recomputed() -> None:
    make, batch = MODULES["attending"]
    plain, recomputed = (
        capture(make, batch(), arguments, cuda=False) for arguments in ({}, recomputing("attending", "32-true")())
    )
    assert sum(cost.flops for cost in recomputed.costs) > 1.2 * sum(cost.flops for cost in plain.costs)


# --- optimizers ---

O = torch.optim  # noqa: E741 - a table of thirty of its classes
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": partial(O.SGD, lr=0.1),
    "momentum": partial(O.SGD, lr=0.1, momentum=0.9),
    "nesterov-foreach": partial(O.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "momentum-fused": partial(O.SGD, lr=0.1, momentum=0.9, fused=True),
    "adagrad-foreach": partial(O.Adagrad, foreach=True),
    "adagrad-fused": partial(O.Adagrad, fused=True),
    "rmsprop": O.RMSprop,
    "rmsprop-centered-foreach": partial(O.RMSprop, centered=True, momentum=0.9, foreach=True),
    "adafactor": O.Adafactor,
    "adafactor-foreach": partial(O.Adafactor, foreach=True),
    "adam-maximize-foreach": partial(O.Adam, maximize=True, foreach=True),
    "adam-tensor-lr": lambda parameters: O.Adam(parameters, lr=torch.tensor(1e-3)),
    "adamw-foreach": partial(O.AdamW, foreach=True),
    "adamw-fused": partial(O.AdamW, fused=True),
    "adamw-amsgrad": partial(O.AdamW, amsgrad=True),
    "adamw-amsgrad-fused": partial(O.AdamW, amsgrad=True, fused=True),
    "adamax-foreach": partial(O.Adamax, foreach=True),
    "nadam-foreach": partial(O.NAdam, foreach=True),
    "radam-foreach": partial(O.RAdam, foreach=True),
    "adadelta-foreach": partial(O.Adadelta, foreach=True),
    "rprop-foreach": partial(O.Rprop, foreach=True),
    "asgd": O.ASGD,
    "muon": lambda parameters: O.Muon([p for p in parameters if p.dim() == 2]),
    "muon-adamw": lambda parameters: MuonAdamW([{"params": [p], "matrices": p.dim() == 2} for p in parameters]),
    "lion": Lion,
    "schedule-free": ScheduleFreeAdamW,
    "adamw-8bit": AdamW8bit,
}
BY_TURNS = list(zip(OPTIMIZERS, itertools.cycle(PRECISIONS), strict=False))


def with_optimizer(make_optimizer: Callable[[Any], Any], made: list[Any]) -> Callable[[], Classifier]:
    """Return what makes a module, whose optimizers are added to ``made``."""

    def optimizer(parameters: Any) -> Any:
        made.append(make_optimizer(parameters))
        return made[-1]

    return lambda: Classifier(nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 5)), optimizer)


@pytest.mark.parametrize(
    ("name", "precision"), [choice if choice in BY_TURNS[1:12:3] else long(*choice) for choice in BY_TURNS]
)
def test_every_optimizer_equals_a_real_run(name: str, precision: str) -> None:
    made: list[Any] = []
    fake, real = both(with_optimizer(OPTIMIZERS[name], made), vectors(), lambda: {"precision": precision})
    assert_equal(fake, real)
    held = {id(storage): storage.nbytes() for storage in storages_of(list(made[-1].state.values()))}
    assert fake.log.breakdown(len(fake.log.events))["optimizer_states"] == sum(held.values())


# --- what differs, and by how much ---


@pytest.mark.long
def test_lbfgs_has_its_full_history() -> None:
    made: list[Any] = []
    fake, real = both(with_optimizer(O.LBFGS, made), vectors(), lambda: {"precision": "32-true"})
    (peak, where), (real_peak, real_where) = fake.log.peak(), real.log.peak()
    assert peak == real_peak
    vector = 4 * (17 * 40 + 41 * 5)
    there, really = fake.log.breakdown(where), real.log.breakdown(real_where)
    # at the peak a real run's newest difference is a state already, and the oldest is none any more
    assert there["optimizer_states"] - really["optimizer_states"] == really["other"] - there["other"] == vector
    # 100 differences of weights and of gradients, direction, gradient and newest difference; their products, a scale
    assert there["optimizer_states"] == 203 * vector + 4 * 201
    assert any("LBFGS keeps" in said for said in fake.assumptions)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_lstm_on_a_cpu_is_not_planned_without_data(precision: str) -> None:
    make, batch = MODULES["recurrent"]
    with pytest.raises(PlanError, match=mentions("LSTM", "CPU")):
        capture(make, batch(), {"precision": precision}, cuda=False)


def test_recurrent_layers_on_a_gpu_are_an_assumption() -> None:
    make, batch = MODULES["recurrent"]
    assert any("cuDNN" in said for said in capture(make, batch(), {}).assumptions)


def test_kernel_that_returns_one_tensor_twice_costs_the_same_each_time() -> None:
    make, batches = MODULES["recurrent"]  # backward of an LSTM's kernel: the gradient of both biases
    batch = batches(4)
    first, second = (capture(make, batch, {"precision": "bf16-mixed"}) for _ in range(2))
    assert first.costs == second.costs


def test_update_of_lists_is_counted_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = fake_mode()
    with mode, Tracer(nn.Linear(1, 1)) as tracer:
        first, second = torch.empty(3), torch.empty(3)
        monkeypatch.setattr(mode, "dispatch", lambda func, *rest: pytest.fail(str(func)))
        torch._foreach_add_([first], [second])
        monkeypatch.undo()
    # two tensors of three elements, of four bytes each
    assert tracer.costs[-1].bytes == 2 * 3 * 4


def test_numbers_of_new_tensors_are_known_without_torchs_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each optimizer makes a number of steps for each parameter, and reads it in each step."""
    ran: list[Any] = []
    computed = Tracer._computed

    def counted(self: Tracer, func: Any, *rest: Any) -> Any:
        ran.append(func)
        return computed(self, func, *rest)

    monkeypatch.setattr(Tracer, "_computed", counted)
    mode = fake_mode()
    with known_numbers(), mode, Tracer(nn.Linear(1, 1)) as tracer:
        number = torch.tensor(1.5)
        assert number.item() == 1.5
        counted_storages = len(tracer.log.labels)
        number += 1
        assert number.item() == 2.5
        assert len(tracer.log.labels) == counted_storages
    assert isinstance(number, FakeTensor)
    assert number.fake_mode is mode
    assert ran == [torch.ops.aten.add_.Tensor]


@pytest.mark.parametrize("others", [False, True], ids=["nothing frozen", "imports frozen"])
def test_garbage_of_before_a_trace_is_freed(others: bool) -> None:
    capture_module._keeps_frozen.cache_clear()
    gc.unfreeze()
    if others:
        gc.freeze()
    module = nn.Identity()
    module.itself = [module]
    garbage = weakref.ref(module)
    del module
    with _collected_at_steps(fake=True):
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.collect()
    frozen = gc.get_freeze_count()
    gc.freeze()
    assert garbage() is None
    assert bool(frozen) is others
    capture_module._keeps_frozen.cache_clear()


def test_frozen_objects_are_counted_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(1) or 1)
    capture_module._keeps_frozen.cache_clear()
    for _ in range(2):
        with _collected_at_steps(fake=True):
            pass
    capture_module._keeps_frozen.cache_clear()
    assert counts == [1]
