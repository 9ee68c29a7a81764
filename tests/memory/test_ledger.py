"""The ledger counts live storages exactly: every number below is spelled out in bytes."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lightning_solo.memory.events import Peak
from lightning_solo.memory.ledger import CATEGORIES, Ledger, saved_for_backward


def test_one_step_by_category():
    layer = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    parameters = (3 * 5 + 5) + (5 * 2 + 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    with Ledger(layer, [optimizer]) as ledger:
        nothing = dict.fromkeys(CATEGORIES, 0)
        assert ledger.live() == nothing | {"weights": 4 * parameters}
        loss = layer(torch.zeros(7, 3)).sum()
        # torch.zeros 7 x 3 (kept by the first layer), tanh's result 7 x 5 and the loss; 7 x 2 was freed
        assert ledger.live() == nothing | {"weights": 4 * parameters, "activations": 4 * (7 * 3 + 7 * 5 + 1)}
        loss.backward()
        del loss
        assert ledger.live() == nothing | {"weights": 4 * parameters, "gradients": 4 * parameters}
        optimizer.step()
        states = 8 * parameters + 4 * 4  # exp_avg 4 + exp_avg_sq 4 bytes a parameter, and a step count a tensor
        assert ledger.live()["optimizer_states"] == states
        optimizer.zero_grad()
        assert ledger.live() == nothing | {"weights": 4 * parameters, "optimizer_states": states}
        assert ledger.live_bytes == 4 * parameters + states


def test_tied_weights_views_and_results_in_place_cost_nothing():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    with Ledger(nn.ModuleList([first, second])) as ledger:
        assert ledger.live()["weights"] == 4 * (16 + 4 + 4)
        before = ledger.live_bytes
        view = first.weight.t()[1:].unflatten(1, (2, 2))
        assert ledger.live_bytes == before
        with torch.no_grad():
            view.add_(1)
            made = torch.ones(10, dtype=torch.bfloat16)
            parts = made.mul_(2).view(2, 5).unbind()
        assert ledger.live()["other"] == 2 * 10
        del made
        assert ledger.live()["other"] == 2 * 10  # held by its views
        del parts
        assert ledger.live_bytes == before


def test_buffers_and_converted_weights_are_weights():
    module = nn.BatchNorm1d(6)
    floats = 4 * (6 + 6 + 6 + 6) + 8  # weight, bias, mean, variance; num_batches_tracked is one int64
    with Ledger(module) as ledger:
        assert ledger.live()["weights"] == floats
        module.to(torch.bfloat16)
        assert ledger.live() == dict.fromkeys(CATEGORIES, 0) | {"weights": 2 * 24 + 8}


def test_freed_storages_are_gone_although_ids_are_used_again():
    with Ledger() as ledger, torch.no_grad():
        for size in range(1, 200):
            made = torch.empty(size)
            assert ledger.live() == dict.fromkeys(CATEGORIES, 0) | {"other": 4 * size}
            del made
        assert ledger.live_bytes == 0
        assert ledger.peak_bytes == 4 * 199


def test_resized_storage_counts_its_new_size():
    with Ledger() as ledger, torch.no_grad():
        made = torch.empty(10)
        made.resize_(20)
        assert ledger.live_bytes == 4 * 20
        made.untyped_storage().resize_(0)
        assert ledger.live_bytes == 0


def test_reset_peak_starts_at_live_bytes():
    with Ledger() as ledger, torch.no_grad():
        kept = torch.empty(5)
        torch.empty(100)
        assert ledger.peak_bytes == 4 * 105
        ledger.reset_peak()
        assert ledger.peak_bytes == 4 * 5
        torch.empty(10)
        assert ledger.peak_bytes == 4 * 15
        assert kept.shape == (5,)


def test_storages_that_never_had_bytes_are_in_no_log():
    with Ledger() as ledger:
        kept = torch.empty(0), torch.ones(3)
        ledger.reset_peak()
        assert ledger.log.held == {0: 4 * 3}
        del kept


def test_older_tensors_count_only_if_owned():
    batch, layer = torch.zeros(9, 3), nn.Linear(3, 2)
    with Ledger() as ledger:
        output = layer(batch)
        assert ledger.live()["activations"] == ledger.live_bytes == 4 * 9 * 2
        assert output.shape == (9, 2)


def test_saved_for_backward_counts_what_checkpoint_keeps():
    def run(x: torch.Tensor, again: bool) -> torch.Tensor:
        hidden = x * 2  # 6 floats, kept by checkpoint's closure as its input
        if again:
            return checkpoint(lambda h: h.sin().cos().exp().sum(), hidden, use_reentrant=False)
        return hidden.sin().cos().exp().sum()

    x = torch.ones(6, requires_grad=True)
    # sin saves its input, cos its input, exp its result, each 6 floats; the loss is one
    assert saved_for_backward(run, x, again=False)[1] == 4 * (6 + 6 + 6 + 1)
    output, kept = saved_for_backward(run, x, again=True)
    assert kept == 4 * (6 + 1)
    assert saved_for_backward(lambda h=None: checkpoint(torch.sin, (x * 2), use_reentrant=False).sum())[1] == 4 * 7
    output.backward()
    assert x.grad is not None


def test_recomputed_activations_are_activations():
    with Ledger() as ledger:
        x = torch.ones(50, requires_grad=True)
        loss = checkpoint(lambda h: (h.sin().cos().exp()).sum(), x, use_reentrant=False)
        seen = []
        x.register_hook(lambda grad: seen.append(ledger.live()["activations"]))
        before = ledger.live()["activations"]
        loss.backward()
    assert seen[0] > before


def profiled_peak(step: Callable[[], object]) -> int:
    """Return the peak of a step's allocations less its frees, as the profiler records them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


def test_workspace_of_an_operator_is_part_of_the_peak() -> None:
    with Ledger() as ledger:
        kept = torch.zeros(100)
        ledger.see_workspace(1000)
        later = torch.zeros(10)
    assert ledger.peak_bytes == 400 + 1000
    assert ledger.peak().breakdown["temporaries"] == 1000
    assert ledger.live_bytes == kept.nbytes + later.nbytes


@pytest.fixture
def no_workspace() -> Iterator[None]:
    """Turn off oneDNN, whose bf16 products allocate and free memory within one operator, which no ledger sees."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags() warns of TF32 on a machine without Intel's GPU
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.mark.usefixtures("no_workspace")
@pytest.mark.parametrize(
    ("hooks", "bf16"),
    [
        ("none", False),
        ("none", True),
        ("packed", False),
        *((hooks, bf16) for hooks in ("save_on_cpu", "checkpoint") for bf16 in (0, 1)),
    ],
)
def test_peak_equals_the_profilers_under_autocast_and_hooks(hooks: str, bf16: bool):
    module = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Sigmoid(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=False)
    # 8192: the generator's state that checkpoint puts aside, 5056 bytes made without an operator, is below 0.1 %
    batch, packed = torch.ones(8192, 64), [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed[0] += 1
        return tensor.to(torch.bfloat16)

    def step() -> None:
        kinds = {
            "save_on_cpu": torch.autograd.graph.save_on_cpu,
            "packed": lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.float()),
        }
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(bf16)), kinds.get(hooks, nullcontext)():
            output = checkpoint(module, batch, use_reentrant=False) if hooks == "checkpoint" else module(batch)
            loss = output.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    gc.disable()  # what checkpoint leaves in cycles goes at no known moment
    try:
        with Ledger(module, [optimizer]) as ledger:
            start = ledger.live_bytes
            step()
            peak = ledger.peak_bytes - start
        assert peak == pytest.approx(profiled_peak(step), rel=0.001)
    finally:
        gc.enable()
    assert packed[0] > 0 or hooks != "packed"


# --- the peak: how much, of what, and where ---


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(8, 16, bias=False), nn.Linear(16, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(x))


def test_peak_has_categories_and_module():
    module = Two()
    weights = 4 * (8 * 16 + 16 * 512)
    with Ledger(module) as ledger:
        x = torch.ones(3, 8)
        with torch.no_grad():
            module(x)
        peak = ledger.peak()
        activations = 4 * (3 * 8 + 3 * 16 + 3 * 512)
        assert peak.breakdown == dict.fromkeys(CATEGORIES, 0) | {
            "weights": weights,
            "activations": 4 * 3 * 8,  # x, made where gradients were on
            "other": activations - 4 * 3 * 8,
        }
        assert (peak.bytes, peak.operator, peak.module) == (weights + activations, "aten.mm.default", "wide")


def test_backward_of_the_loss_belongs_to_no_part():
    module = Two()
    with Ledger(module) as ledger:
        module(torch.ones(300, 8)).square().sum().backward()
    peak = ledger.peak()
    assert peak == ledger.peak()
    assert peak.breakdown["weights"] == 4 * (8 * 16 + 16 * 512)
    assert sum(peak.breakdown.values()) == peak.bytes == ledger.peak_bytes
    # of the square: the gradient of its result, a scalar expanded; 2 x the input, their product, and the input
    assert peak.breakdown["temporaries"] + peak.breakdown["activations"] >= 4 * 300 * 512 * 3
    assert peak.module == ""  # the loss belongs to no part


def test_peak_in_backward_separates_temporaries_from_activations():
    layer, x = nn.Linear(10, 20, bias=False), torch.ones(50, 10)
    with Ledger(layer) as ledger:
        loss = layer(x).sigmoid().sum()
        ledger.reset_peak()
        loss.backward()
    assert ledger.peak().breakdown == dict.fromkeys(CATEGORIES, 0) | {
        "weights": 4 * 10 * 20,
        "activations": 4 * (50 * 20 + 1 + 1),  # what sigmoid saved, the loss, and the 1 that backward begins with
        "temporaries": 4 * 50 * 20,  # the gradient of what the layer returned
    }


def test_a_gradient_that_is_freed_in_backward_is_a_gradient():
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(100))
    module.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with Ledger(module) as ledger:
        loss = module.weight.exp().sum()
        ledger.reset_peak()
        loss.backward()
    assert ledger.peak().breakdown == dict.fromkeys(CATEGORIES, 0) | {
        "weights": 4 * 100,
        "activations": 4 * (100 + 1 + 1),  # what exp saved, the loss, and the 1 that backward begins with
        "gradients": 4 * 100,
    }


def test_peak_in_backward_has_the_name_of_the_part():
    module = Two()
    with Ledger(module) as ledger:
        module(torch.ones(1, 8)).sum().backward()  # the gradients outweigh all else
    peak = ledger.peak()
    assert peak.breakdown["gradients"] == 4 * (16 * 512 + 8 * 16)  # though they became ones a moment later
    assert (peak.operator, peak.module) == ("aten.mm.default", "narrow")


def test_a_recomputed_block_has_its_own_name_in_backward():
    wide = nn.Sequential(nn.Linear(4, 4096), nn.ReLU(), nn.Linear(4096, 4))
    with Ledger(wide) as ledger:
        x = torch.ones(64, 4, requires_grad=True)
        loss = checkpoint(wide, x, use_reentrant=False).sum()
        ledger.reset_peak()
        loss.backward()
    assert ledger.peak().module in ("1", "2")  # where its three wide tensors meet
    assert ledger.peak().breakdown["activations"] >= 4 * 64 * 4096


def test_freed_states_and_gradients_keep_their_category_in_the_peak():
    layer = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    with Ledger(layer, [optimizer]) as ledger:
        layer(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = ledger.peak().breakdown
    size = 4 * 64 * 64
    assert found["weights"] == found["gradients"] == size
    assert found["optimizer_states"] == 2 * size + 4  # and a step count
    assert found["other"] >= size  # what the step divides by
    assert ledger.live()["gradients"] == 0


def test_host_allocations_are_counted_on_the_host():
    with Ledger() as ledger, torch.no_grad():
        kept = torch.ones(10)
        with ledger.on_host():
            moved = torch.ones(100)
        assert (ledger.live_bytes, ledger.live(on_host=True)["other"]) == (4 * 10, 4 * 100)
        assert (ledger.peak_bytes, ledger.host_peak_bytes) == (4 * 10, 4 * 100)
        del moved
        assert ledger.live(on_host=True)["other"] == 0
        ledger.reset_peak()
        assert (ledger.peak_bytes, ledger.host_peak_bytes) == (4 * 10, 0)
        assert kept.shape == (10,)


def test_storages_of_other_devices_are_on_the_host():
    with Ledger(device="meta") as ledger, torch.no_grad():
        held = torch.empty(10, device="meta"), torch.empty(100)
        assert (ledger.live_bytes, ledger.host_peak_bytes) == (4 * 10, 4 * 100)
        assert len(held) == 2


def test_the_hooks_are_gone_after_an_exception():
    def hooks() -> tuple[int, int]:
        module = nn.modules.module
        return len(module._global_forward_pre_hooks), len(module._global_forward_hooks)

    before = hooks()
    module = Two()
    with pytest.raises(RuntimeError, match="shapes"), Ledger(module):
        module(torch.ones(1, 9)) if hooks() != before else None
    assert hooks() == before


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_fake_tensors_count_as_real_ones(bf16: bool, again: bool):
    def step() -> tuple[Peak, dict[str, int], list[tuple[int, int]]]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.GELU(), nn.Linear(64, 32))
        module = nn.Sequential(nn.Linear(16, 32), block, nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
        with Ledger(module, [optimizer]) as ledger:
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    x = module[0](torch.ones(5, 16))
                    x = checkpoint(block, x, use_reentrant=False) if again else block(x)
                    loss = module[2](x).float().square().mean()
                loss.backward()
                del loss, x
                optimizer.step()
                optimizer.zero_grad()
            gc.collect()  # checkpoint leaves cycles
            return ledger.peak(), ledger.live(), [change for _, change in ledger.log.events]

    with FakeTensorMode():
        fake = step()
    real = step()
    assert fake[:2] == real[:2]
    assert Counter(fake[2]) == Counter(real[2])  # within one operator they are freed in any order
