"""A planned step of compact states costs what the kernels move; of a loop over chunks two are traced."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_solo.nn import quantized
from lightning_solo.optim import adamw_update, compressed_moments, cpu_kernel, kernels, split_weights
from lightning_solo.optim.adamw_states import bytes_of, state_layout
from lightning_solo.planner.capture import Trace, capture
from lightning_solo.planner.fake_modules import fake_mode, known_numbers
from lightning_solo.planner.kernels import planned_kernels
from lightning_solo.planner.rules import arrange
from lightning_solo.planner.tracer import Cost, Tracer
from lightning_solo.presets.compose import compose
from tests.conftest import long
from tests.modules import Stack, regression

WIDTH = 1024
LARGE = 2**20  # elements from which a parameter has a launch of its own


def costs_of_a_step(preset: str) -> tuple[list[Cost], list[torch.Tensor]]:
    """Return what a planned step costs, and the module's parameters."""
    net = Stack(width=WIDTH)
    batch = [torch.zeros(2, WIDTH), torch.zeros(2, 1)]
    trace = capture(lambda: regression(L, net), batch, arrange(compose(preset), {}).arguments())
    return trace.costs[trace.steps[0] : trace.steps[1]], [p.detach().bfloat16() for p in net.parameters()]


def moved(p: torch.Tensor, bits: Any = (24, 8)) -> int:
    """Return what a step reads and writes of a parameter: all but the gradient twice."""
    return 2 * (p.nbytes + bytes_of(state_layout(p, *bits))) + p.nbytes


@pytest.mark.parametrize("preset", ["compact", long("compact_host")])
def test_a_large_parameter_is_one_launch_of_its_bytes(preset: str) -> None:
    costs, parameters = costs_of_a_step(preset)
    large = [p for p in parameters if p.numel() >= LARGE]
    assert large
    sizes = [cost.bytes for cost in costs if cost.dtype == torch.float32 and not cost.flops]
    for size in {moved(p) for p in large}:
        assert sizes.count(size) >= sum(moved(p) == size for p in large)


def test_pieces_of_a_planned_step_take_no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    run = Tracer.run
    monkeypatch.setattr(Tracer, "run", lambda self, func, *rest: (ran.append(func), run(self, func, *rest))[1])
    tracer = Tracer(torch.nn.Linear(1, 1))
    with fake_mode(), tracer, planned_kernels(tracer, cuda=True):
        piece = kernels.Piece(
            {"weight": torch.empty(1000), "exp_avg_scale": torch.empty(8)}, kernels.Scalars(*range(8))
        )
        ran.clear()
        parts = piece.split(3)
    assert ran == []
    assert [(p.first_row, *(t.nbytes for t in p.tensors.values())) for p in parts] == [
        (0, 1536, 12),
        (3, 1536, 12),
        (6, 928, 8),
    ]


def test_small_parameters_share_launches() -> None:
    costs, parameters = costs_of_a_step("compact")
    small = [p for p in parameters if p.numel() < LARGE]
    for has_codes in (True, False):
        alike = [p for p in small if (p.numel() >= compressed_moments.LEAST) == has_codes]
        assert len(alike) > 1
        assert sum(map(moved, alike)) in [cost.bytes for cost in costs]


def attention_costs(causal: bool, keys: int = 64) -> list[Cost]:
    """Return the costs of attention of 64 queries, and of its backward."""

    class Attends(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x[:, :64].view(2, 1, 1, 64).expand(2, 1, 64, 64).bfloat16() * self.head.weight[0, 0].bfloat16()
            k = q[:, :, :keys]
            return torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=causal).float().mean((1, 2, 3))

    batch = [torch.zeros(2, WIDTH), torch.zeros(2)]
    trace = capture(lambda: regression(L, Attends(width=WIDTH)), batch, arrange(compose("baseline"), {}).arguments())
    return [cost for cost in trace.costs[trace.steps[0] : trace.steps[1]] if cost.flops]


def test_causal_attention_counts_half_of_the_pairs() -> None:
    whole, half = attention_costs(causal=False), attention_costs(causal=True)
    assert len(whole) == 2
    assert [cost.flops for cost in half] == [cost.flops // 2 for cost in whole]
    assert attention_costs(causal=True, keys=32)[0].flops == whole[0].flops // 2, "half of the keys, not a square"


# --- on a CPU ---

CHUNK = 2**12  # elements; the largest parameters have 256 of them


def traces_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, preset: list[str], optimizer: str = "AdamW"
) -> tuple[Trace, Trace]:
    """Return (fake, real) traces of a module whose parameters have many chunks."""
    for table in (adamw_update.CHUNK, split_weights.CHUNK):
        monkeypatch.setitem(table, "cpu", CHUNK)

    def make() -> Any:
        module = regression(L, Stack(width=512))
        module.configure_optimizers = lambda: getattr(torch.optim, optimizer)(module.parameters(), lr=0.01)
        return module

    batch = [torch.zeros(2, 512), torch.zeros(2, 1)]
    arranged = arrange(compose("compact", preset), {})
    fake, real = (capture(make, batch, arranged.arguments(), fake=fake, cuda=False) for fake in (True, False))
    return fake, real


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "optimizer"),
    [
        ([], "AdamW"),
        (["callback.compact_states.moment_bits=32"], "AdamW"),
        (["callback.compact_states.master_bits=16-stochastic"], "AdamW"),
        ([], "SGD"),
    ],
    ids=["default", "fp32_moments", "stochastic", "other_optimizer"],
)
def test_two_chunks_are_traced_for_all(preset: list[str], optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernel, "kernel", lambda: None)  # as without a compiler
    fake, real = traces_on_a_cpu(monkeypatch, preset, optimizer)
    assert len(real.costs) > 5 * len(fake.costs)
    assert fake.log.peak()[0] == real.log.peak()[0]
    moved = [sum(cost.bytes for cost in trace.costs) for trace in (fake, real)]
    assert moved[0] == pytest.approx(moved[1], rel=0.02)


@pytest.mark.long
@pytest.mark.skipif(cpu_kernel.kernel() is None, reason="no C++ compiler")
def test_cpp_step_moves_each_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, real = traces_on_a_cpu(monkeypatch, [])
    for trace in (fake, real):
        step = [cost.bytes for cost in trace.costs[trace.steps[0] : trace.steps[1]]]
        large = torch.empty(2048, 512, dtype=torch.bfloat16)
        assert step.count(moved(large)) >= 2
    assert fake.log.peak()[0] == real.log.peak()[0]


def test_table_of_quantized_weights_has_no_numbers_in_a_plan() -> None:
    with fake_mode(), known_numbers():
        table: Any = quantized._table(torch.device("cpu"))
        with planned_kernels(Tracer(torch.nn.Identity()), cuda=True):
            planned: Any = quantized._table(torch.device("cpu"))
    assert table.constant is not None  # so that each view of it would be computed
    assert planned.constant is None
    assert (planned.shape, planned.dtype) == (table.shape, table.dtype)
