"""What ZeRO's engine steps on the host: the same numbers as torch's, shared groups, states that read both ways."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, lr_scheduler

from lightning_solo.errors import CapabilityError, ConflictError, PresetError
from lightning_solo.zero.host_optimizer import (
    HostOptimizer,
    counterpart,
    from_original_state,
    host_optimizer,
    to_original_state,
)
from tests.messages import mentions, nearest

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = pytest.mark.timeout(600)  # the first test of a machine's life builds the extension
STEPS = 50
# 50 steps of 0.5 ulp of fp32 at values up to 4 (2.4e-7) are 6e-6; DeepSpeed multiplies and adds in one rounding.
TOLERANCE = 1e-5


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in (1003, 517)]


def groups(of: list[nn.Parameter], *, betas: bool = True) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [
        {"params": of[:1], "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
        {"params": of[1:], "lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0},
    ]
    return made if betas else [{name: value for name, value in group.items() if name != "betas"} for group in made]


def flat(of: list[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach() for parameter in of])


def train(optimizer: Optimizer, of: list[nn.Parameter], steps: int = STEPS, seed: int = 1, then: Any = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in of:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        if then is not None:
            then()


MAKERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW": lambda of: AdamW(groups(of)),
    "Adam": lambda of: Adam(groups(of)),
    "Adam, decoupled": lambda of: Adam(groups(of), decoupled_weight_decay=True),
    "AdamW, tensor lr": lambda of: AdamW([{**group, "lr": torch.tensor(group["lr"])} for group in groups(of)]),
    "Adagrad": lambda of: Adagrad(groups(of, betas=False)),
}
CLASSES = {"Adagrad": "DeepSpeedCPUAdagrad"}


class Lion(Optimizer):
    """The update of Chen et al. 2023, as lion_pytorch writes it."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                first = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter -= group["lr"] * first.lerp(parameter.grad, 1 - group["betas"][0]).sign()
                first.lerp_(parameter.grad, 1 - group["betas"][1])


class Lamb(Optimizer):
    """A step whose length is the parameter's norm: what makes LAMB and LARS."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.norm() * parameter.grad / parameter.grad.norm()


# --- DeepSpeed's versions compute the same ---


@pytest.mark.long  # builds DeepSpeed's extension
@pytest.mark.parametrize("name", MAKERS)
def test_two_groups_train_as_torch_does(name: str) -> None:
    ours, theirs = parameters(), parameters()
    host = host_optimizer(MAKERS[name](ours), kind="deepspeed")
    assert type(host.optimizer).__name__ == CLASSES.get(name, "DeepSpeedCPUAdam")
    pairs = list(zip(host.optimizer.param_groups, host.original.param_groups, strict=True))
    assert len(pairs) == 2
    assert all(new is old for new, old in pairs)
    assert host.optimizer is not host.original
    train(host.optimizer, ours)
    train(MAKERS[name](theirs), theirs)
    assert (flat(theirs) - flat(parameters())).abs().max() > 0.05  # trained
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=0, atol=TOLERANCE)


@pytest.mark.long  # builds DeepSpeed's extension
def test_hyper_parameters_set_by_a_schedule_are_used_in_each_step() -> None:
    results = []
    for kind in ("deepspeed", "torch"):
        of = parameters()
        optimizer = AdamW(groups(of))
        schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 1e-1], total_steps=STEPS + 1)  # lr and betas
        host = host_optimizer(optimizer, [schedule], kind=kind)
        seen = set()

        def then(group: Any = host.optimizer.param_groups[0], schedule: Any = schedule, seen: Any = seen) -> None:
            schedule.step()
            seen.add(group["betas"])

        train(host.optimizer, of, then=then)
        assert len(seen) > STEPS // 2
        results.append(flat(of))
    torch.testing.assert_close(*results, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda of: AdamW(of, amsgrad=True), "no amsgrad"),
        (lambda of: AdamW(of, maximize=True), "no maximize"),
        (lambda of: type("Mine", (AdamW,), {})(of), "has none"),
        (lambda of: AdamW([{"params": of, "decoupled_weight_decay": False}, {"params": parameters()}]), "differ in"),
        (lambda of: Adagrad(of, lr_decay=0.1), "neither lr_decay"),
        (lambda of: Adagrad(of, initial_accumulator_value=0.1), "neither lr_decay"),
        (lambda of: Lion(of), "no gradient"),
        (lambda of: SGD(of, lr=0.1), "has none"),
    ],
)
def test_optimizer_that_deepspeed_computes_differently_is_kept(make: Any, reason: str) -> None:
    optimizer = make(parameters())
    assert reason in str(counterpart(optimizer))
    with pytest.raises(ConflictError, match="write 'auto' or 'torch'"):
        host_optimizer(optimizer, kind="deepspeed")
    if not isinstance(optimizer, Adagrad):
        assert host_optimizer(optimizer) == HostOptimizer(optimizer, optimizer, {})


@pytest.mark.long  # builds DeepSpeed's extension
def test_deepspeeds_lion_moves_what_has_no_gradient() -> None:
    # Why Lion is not replaced: should this fail one day, it can be.
    from lightning_solo.zero.extension import load_extension

    load_extension("cpu_lion")
    from deepspeed.ops.lion import DeepSpeedCPULion

    still, walks = nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(40))
    still.grad, walks.grad = torch.zeros(40), torch.zeros(40)
    Lion([still]).step()
    DeepSpeedCPULion([walks], lr=1e-3, betas=(0.9, 0.99)).step()
    assert torch.equal(still, torch.ones(40))
    assert not torch.equal(walks, torch.ones(40))


@pytest.mark.long  # builds DeepSpeed's extension
def test_deepspeeds_own_is_kept() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    host_optimizer(AdamW(parameters()), kind="deepspeed")  # builds it
    optimizer = DeepSpeedCPUAdam(parameters())
    for kind in ("auto", "deepspeed", "torch"):
        assert host_optimizer(optimizer, kind=kind).optimizer is optimizer


def fused_adam(of: list[nn.Parameter], adam_w_mode: int) -> Optimizer:
    """Return DeepSpeed's FusedAdam but for its CUDA kernels, which its constructor would compile."""
    from deepspeed.ops.adam import FusedAdam

    made: Any = object.__new__(FusedAdam)
    defaults = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    Optimizer.__init__(made, groups(of), defaults)
    made.adam_w_mode = adam_w_mode
    return made  # type: ignore[no-any-return]


@pytest.mark.long  # builds DeepSpeed's extension
@pytest.mark.parametrize(("mode", "same_as"), [(1, AdamW), (0, Adam)])
def test_fused_adam_becomes_the_one_for_the_host(mode: int, same_as: Any) -> None:
    ours, theirs = parameters(), parameters()
    host = host_optimizer(fused_adam(ours, mode))
    assert type(host.optimizer).__name__ == "DeepSpeedCPUAdam"
    train(host.optimizer, ours)
    train(same_as(groups(theirs)), theirs)
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=0, atol=TOLERANCE)
    state = host.optimizer.state[ours[0]]
    assert to_original_state(host, state)["step"] == STEPS
    with pytest.raises(ConflictError, match="CUDA"):
        host_optimizer(fused_adam(parameters(), mode), kind="torch")


# --- groups and schedulers ---


@pytest.mark.long  # builds DeepSpeed's extension
def test_schedulers_are_bound_to_the_new_one_without_a_warning() -> None:
    optimizer = AdamW(groups(parameters()))
    warm_up = lr_scheduler.LinearLR(optimizer, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    nested = lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[2])
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    other = lr_scheduler.StepLR(SGD(parameters(), lr=0.1), 1)
    not_mine = other.optimizer
    host = host_optimizer(optimizer, [nested, plateau, other], kind="deepspeed")
    assert all(one.optimizer is host.optimizer for one in (nested, warm_up, cosine, plateau))
    assert other.optimizer is not_mine
    before = host.optimizer.param_groups[0]["lr"]
    train(host.optimizer, host.optimizer.param_groups[0]["params"], 3, then=nested.step)  # warnings are errors here
    assert host.optimizer.param_groups[0]["lr"] != before


@pytest.mark.long  # builds DeepSpeed's extension
def test_the_order_of_steps_is_still_watched() -> None:
    optimizer = AdamW(groups(parameters()))
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    host_optimizer(optimizer, [schedule], kind="deepspeed")
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()


@pytest.mark.long  # builds DeepSpeed's extension
def test_hooks_and_state_move_along() -> None:
    of, calls = parameters(), []
    optimizer = AdamW(groups(of))
    optimizer.register_step_post_hook(lambda *arguments: calls.append(arguments[0]))
    train(optimizer, of, 3)
    host = host_optimizer(optimizer, kind="deepspeed")
    assert len(calls) == 3  # trying it on flat tensors called no hook
    assert host.optimizer.state[of[0]]["step"] == 3
    assert not optimizer.state
    train(host.optimizer, of, 1)
    assert calls[3] is host.optimizer


# --- states ---


@pytest.mark.long  # builds DeepSpeed's extension
@pytest.mark.parametrize("name", [name for name in MAKERS if "tensor" not in name])
def test_a_state_continues_in_torch_and_back(name: str) -> None:
    ours, theirs = parameters(), parameters()
    host, torchs = host_optimizer(MAKERS[name](ours), kind="deepspeed"), MAKERS[name](theirs)
    train(host.optimizer, ours, 5)
    train(torchs, theirs, 5)
    saved = torchs.state_dict()
    read = {number: to_original_state(host, host.optimizer.state[one]) for number, one in enumerate(ours)}
    for number, state in saved["state"].items():
        assert read[number].keys() == state.keys()
        assert torch.equal(read[number]["step"], state["step"])
        assert read[number]["step"].dtype == state["step"].dtype
        for tensor in state:
            torch.testing.assert_close(read[number][tensor], state[tensor], rtol=1e-4, atol=1e-6)
    of = [nn.Parameter(one.detach().clone()) for one in ours]
    resumed = MAKERS[name](of)
    resumed.load_state_dict(copy.deepcopy({**saved, "state": read}))
    back = host_optimizer(MAKERS[name](again := [nn.Parameter(one.detach().clone()) for one in ours]), kind="deepspeed")
    for number, one in enumerate(again):
        back.optimizer.state[one].update(copy.deepcopy(from_original_state(back, read[number])))
    train(host.optimizer, ours, 5, seed=2)
    train(resumed, of, 5, seed=2)
    train(back.optimizer, again, 5, seed=2)
    torch.testing.assert_close(flat(of), flat(ours), rtol=0, atol=TOLERANCE)
    assert torch.equal(flat(again), flat(ours))
    assert all(type(state["step"]) is int for state in back.optimizer.state.values())


def test_a_state_of_ones_own_optimizer_stays_as_it_is() -> None:
    host = host_optimizer(SGD(parameters(), lr=0.1, momentum=0.9))
    state = {"momentum_buffer": torch.ones(3)}
    assert to_original_state(host, state) == state == from_original_state(host, state)
    assert to_original_state(host, state) is not state


# --- where it can't be built ---


@pytest.fixture
def no_compiler(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler, nothing built, in a process that has loaded nothing."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("name", ["AdamW", "Adam", "Adam, decoupled", "AdamW, tensor lr"])
def test_by_default_torchs_fused_loop_steps_and_nothing_is_built(name: str) -> None:
    ours, theirs = parameters(), parameters()
    host = host_optimizer(MAKERS[name](ours))
    assert host.optimizer is host.original
    assert all(group["fused"] for group in host.optimizer.param_groups)
    train(host.optimizer, ours)
    train(MAKERS[name](theirs), theirs)
    assert (flat(theirs) - flat(parameters())).abs().max() > 0.05  # trained
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=0, atol=TOLERANCE)


def test_a_loop_that_the_user_chose_stays() -> None:
    for chosen in ({"foreach": True}, {"fused": False}):
        optimizer = AdamW(parameters(), **chosen)
        before = [dict(group) for group in optimizer.param_groups]
        host_optimizer(optimizer)
        assert optimizer.param_groups == before
    optimizer = AdamW(parameters())
    host_optimizer(optimizer, kind="torch")
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.usefixtures("no_compiler")
def test_what_has_no_other_way_is_refused() -> None:
    for optimizer, kind in ((AdamW(parameters()), "deepspeed"), (Adagrad(parameters()), "auto")):
        with pytest.raises(CapabilityError, match="CXX names"):
            host_optimizer(optimizer, kind=kind)


# --- what can't work on flat partitions ---


ELEMENT_WISE: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
    (AdamW, {"amsgrad": True}),
    (AdamW, {"fused": True, "maximize": True}),
    (SGD, {"lr": 0.0}),
    (Lion, {}),
]


@pytest.mark.parametrize(("kind", "arguments"), ELEMENT_WISE)
def test_element_wise_optimizers_pass(kind: Any, arguments: dict[str, Any]) -> None:
    of = parameters()
    optimizer = kind(of, **arguments)
    before, random = flat(of), torch.get_rng_state()
    assert host_optimizer(optimizer).optimizer is optimizer  # warnings are errors here
    assert torch.equal(flat(of), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda of: torch.optim.Adafactor(of), ["Adafactor", "the norm"]),
        (lambda of: Lamb(of), ["Lamb", "the norm"]),
        (lambda of: Lamb(of, lr=0.0), ["Lamb", "the norm"]),
        (lambda of: torch.optim.Muon([one.unsqueeze(0).detach() for one in of]), ["one dimension"]),
        (lambda of: torch.optim.LBFGS(of), ["closure"]),
        (lambda of: torch.optim.SparseAdam(of), ["sparse gradients"]),
        (lambda of: AdamW(of, amsgrad=True, capturable=True), ["capturable=False"]),
        (lambda of: Adagrad(of, lr_decay=0.1), ["groups and schedules"]),
    ],
)
def test_optimizer_that_differs_on_flat_tensors_is_refused(make: Any, words: list[str]) -> None:
    with pytest.raises(ConflictError, match=mentions(*words)) as refused:
        host_optimizer(make(parameters()))
    assert "write" in str(refused.value)


def test_optimizer_that_the_trial_cannot_run_gives_a_warning() -> None:
    class Fails(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise KeyError("exp_avg")

    with pytest.warns(UserWarning, match=mentions("Fails", "KeyError")):
        host_optimizer(Fails(parameters(), lr=0.1))


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(PresetError, match=nearest("deepspeed")):
        host_optimizer(AdamW(parameters()), kind="deepsped")
