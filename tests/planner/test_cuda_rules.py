"""CUDA's policy on tensors of the CPU: each rule acts, to the byte, and none is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_solo.memory.ledger import Ledger, saved_for_backward
from lightning_solo.planner.capture import capture
from lightning_solo.planner.cuda_rules import cuda_rules
from lightning_solo.planner.fake_modules import fake_mode
from lightning_solo.planner.optimizer_rules import choose_foreach
from tests.planner.modules import Classifier, vectors

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BATCH, HEADS, WIDTH = 2, 3, 16


# --- attention ---


def attend(
    length: int,
    dtype: torch.dtype = BF16,
    *,
    attention: str = "fused",
    width: int = WIDTH,
    groups: int = HEADS,
    mask: tuple[int, ...] | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[str, int]:
    """Return (the kernel, the bytes that attention keeps for backward besides query, key and value)."""
    with fake_mode(), cuda_rules(attention):
        query = torch.empty(BATCH, HEADS, length, width, dtype=dtype, requires_grad=True)
        key, value = (torch.empty(BATCH, groups, length, width, dtype=dtype, requires_grad=True) for _ in range(2))
        allowed = None if mask is None else torch.ones(mask, dtype=torch.bool)
        with Ledger() as ledger:
            out = F.scaled_dot_product_attention(query, key, value, allowed, dropout, **arguments)
            assert (out.dtype, out.shape) == (dtype, query.shape)
            nodes, names = [out.grad_fn], []
            while nodes:
                node = nodes.pop()
                if node is not None:
                    names.append(node.name())
                    nodes += [following for following, _ in node.next_functions]
            kernel = next((name for name in ("Flash", "Efficient") if any(name in n for n in names)), "Math")
            return kernel, ledger.live()["activations"]


def flash(length: int, element: int, width: int = WIDTH) -> int:
    # the output, its logsumexp in fp32, the generator's state of 2 x 8 bytes and an unused 8
    return BATCH * HEADS * length * (element * width + 4) + 24


def efficient(length: int, element: int) -> int:
    # the output, its logsumexp in fp32 for rows in steps of 32, seed and offset of 8 bytes
    return BATCH * HEADS * (length * element * WIDTH + -(-length // 32) * 32 * 4) + 16


@pytest.mark.parametrize("length", [64, 65, 1024])
@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"dropout": 0.1}], ids=["plain", "causal", "dropout"])
def test_attention_in_16_bits_is_flash_and_linear_in_the_length(length: int, arguments: dict[str, Any]) -> None:
    assert attend(length, BF16, **arguments) == ("Flash", flash(length, 2))
    assert attend(length, FP16, **arguments) == ("Flash", flash(length, 2))


@pytest.mark.parametrize("length", [64, 65, 1024])
def test_attention_in_fp32_is_memory_efficient(length: int) -> None:
    assert attend(length, FP32) == ("Efficient", efficient(length, 4))
    assert attend(length, FP32, dropout=0.1) == ("Efficient", efficient(length, 4))


@pytest.mark.parametrize(
    ("length", "row"),
    [(64, 64), (65, 72)],  # rows of whole 16 bytes: 8 elements of 2
)
def test_a_mask_is_memory_efficient_and_becomes_numbers(length: int, row: int) -> None:
    mask = (length, length)
    assert attend(length, BF16, mask=mask) == ("Efficient", efficient(length, 2) + length * row * 2)
    of_each = (BATCH, 1, length, length)  # heads share one
    assert attend(length, BF16, mask=of_each) == ("Efficient", efficient(length, 2) + BATCH * length * row * 2)


def test_head_without_a_flash_kernel_is_memory_efficient() -> None:
    assert attend(64, width=256)[0] == "Flash"
    assert attend(64, width=264)[0] == "Efficient"
    # of 12, padded to 16: query, key and value as well
    assert attend(64, width=12) == ("Flash", flash(64, 2) + 3 * 2 * BATCH * HEADS * 64 * 16)
    assert attend(64, FP64)[0] == "Math"


def test_grouped_queries_are_repeated_for_the_memory_efficient_kernel_only() -> None:
    assert attend(64, groups=1, enable_gqa=True) == ("Flash", flash(64, 2))
    repeated = 2 * BATCH * HEADS * 64 * WIDTH * 4  # key and value
    assert attend(64, FP32, groups=1, enable_gqa=True) == ("Efficient", efficient(64, 4) + repeated)


def test_plain_attention_keeps_the_scores() -> None:
    kernel, kept = attend(64, FP32, attention="math")
    assert kernel == "Math"
    # scaled query and key, the output, and the scores
    assert kept == 3 * BATCH * HEADS * 64 * WIDTH * 4 + BATCH * HEADS * 64 * 64 * 4


def test_attention_under_autocast_runs_in_16_bits() -> None:
    with fake_mode(), cuda_rules(), torch.autocast("cpu", BF16):
        query, key, value = (torch.empty(BATCH, HEADS, 64, WIDTH, requires_grad=True) for _ in range(3))
        out, kept = saved_for_backward(F.scaled_dot_product_attention, query, key, value)
    assert out.dtype is BF16
    assert kept == flash(64, 2) + 3 * BATCH * HEADS * 64 * WIDTH * 2  # query, key and value are cast, each


# --- dropout ---


@pytest.mark.parametrize(("dtype", "element"), [(FP32, 4), (BF16, 2)])
def test_dropout_keeps_a_mask_of_one_byte(dtype: torch.dtype, element: int) -> None:
    def kept() -> int:
        return saved_for_backward(F.dropout, torch.empty(1000, dtype=dtype, requires_grad=True), 0.1)[1]

    with fake_mode():
        assert kept() == 1000 * (element + element), "the CPU's: output, and a mask of its type"
        with cuda_rules():
            assert kept() == 1000 * (element + 1)


def test_dropout_that_drops_nothing_keeps_nothing() -> None:
    with fake_mode(), cuda_rules():
        x = torch.empty(1000, requires_grad=True)
        assert saved_for_backward(F.dropout, x, 0.0)[1] == 0
        assert saved_for_backward(F.dropout, x, 0.5, False)[1] == 0


# --- autocast ---

IN_FP32: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64)),
    "mse_loss": lambda x: F.mse_loss(x, x.detach()),
    "l1_loss": lambda x: F.l1_loss(x, x.detach()),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.detach()),
    "kl_div": lambda x: F.kl_div(x, x.detach()),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.detach()),
    "exp": lambda x: x.exp(),
    "log": lambda x: x.log(),
    "pow": lambda x: x.pow(2),
    "rsqrt": lambda x: x.rsqrt(),
    "sum": lambda x: x.sum(),
    "cumsum": lambda x: x.cumsum(0),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.detach()),
}
OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "told otherwise": (lambda x: x.softmax(-1, dtype=BF16), BF16),
    "relu": (lambda x: x.relu(), BF16),
    "gelu": (lambda x: F.gelu(x), BF16),
    "mean": (lambda x: x.mean(), BF16),
    "matmul": (lambda x: x @ x.T.float(), BF16),
    "double stays": (lambda x: x.double().exp(), FP64),
    "numbers of whole": (lambda x: torch.ones(3, dtype=torch.int64).sum(), torch.int64),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", IN_FP32)
@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_autocast_runs_cudas_list_in_fp32(name: str, fake: bool) -> None:
    with fake_mode() if fake else torch.enable_grad(), cuda_rules(), torch.autocast("cpu", BF16):
        x = torch.ones(3, 4, dtype=BF16, requires_grad=True)
        result = IN_FP32[name](x)
        assert result.dtype is FP32
        result.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is BF16


UNARY = ("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt")


@pytest.mark.parametrize("name", [*UNARY, "sinh", "tan", "prod"])
def test_listed_functions_run_in_fp32(name: str) -> None:
    with fake_mode(), cuda_rules(), torch.autocast("cpu", BF16):
        assert getattr(torch, name)(torch.empty(3, 4, dtype=BF16)).dtype is FP32


@pytest.mark.parametrize(("run", "dtype"), OTHERS.values(), ids=OTHERS)
def test_autocast_keeps_other_types(run: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    with fake_mode(), cuda_rules(), torch.autocast("cpu", BF16):
        assert run(torch.ones(3, 4, dtype=BF16)).dtype is dtype


def test_without_autocast_16_bits_stay() -> None:
    with fake_mode(), cuda_rules():
        x = torch.ones(3, 4, dtype=BF16)
        assert {IN_FP32[name](x).dtype for name in ("softmax", "layer_norm", "exp", "sum")} == {BF16}


# --- optimizers ---


@pytest.mark.parametrize(
    ("given", "foreach"),
    [
        ({}, True),
        ({"foreach": False}, False),
        ({"foreach": True}, True),
        ({"fused": True}, None),
        ({"fused": False}, True),
        ({"differentiable": True}, None),  # for which torch has no such kernel
    ],
)
def test_foreach_is_set_if_left_open(given: dict[str, Any], foreach: bool | None) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(3, 2).parameters(), **given)
    choose_foreach(optimizer)
    assert [group["foreach"] for group in optimizer.param_groups] == [foreach]


def test_custom_optimizer_gets_no_foreach() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 1e-3})

    optimizer = Own(nn.Linear(3, 2).parameters())
    choose_foreach(optimizer)
    assert "foreach" not in optimizer.param_groups[0]


def wide(**arguments: Any) -> Callable[[], Classifier]:
    """A module of nothing but weights, of which there are many: the optimizer step is its peak."""
    layers = lambda: nn.Sequential(nn.Linear(16, 64), *[nn.Linear(64, 64) for _ in range(8)], nn.Linear(64, 5))  # noqa: E731
    return lambda: Classifier(layers(), lambda parameters: torch.optim.AdamW(parameters, **arguments))


@pytest.mark.long
def test_foreach_takes_a_copy_of_the_weights() -> None:
    peaks = {}
    for name, arguments in {"unset": {}, "all": {"foreach": True}, "each": {"foreach": False}}.items():
        log = capture(wide(**arguments), vectors(2), {"precision": "32-true"}).log
        peaks[name] = log.peak()[0]
        weights = log.breakdown(0)["weights"]
    assert peaks["unset"] == peaks["all"]
    # the denominator of all at once is as many bytes as weights; of each two of the largest are there at once
    assert peaks["all"] - peaks["each"] == pytest.approx(weights - 2 * 64 * 64 * 4, abs=1024)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW])
def test_fused_optimizers_compute_nothing(optimizer: Any) -> None:
    with fake_mode(), cuda_rules():
        parameter = nn.Parameter(torch.empty(2**42))  # 16 TiB: what computed or allocated would end here
        parameter.grad = torch.empty_like(parameter)
        made = optimizer([parameter], lr=0.1, fused=True)
        with Ledger(optimizers=[made]) as ledger:
            made.step()
            made.step()
        states = sum(t.nbytes for t in made.state[parameter].values() if isinstance(t, Tensor))
        assert ledger.peak_bytes <= states + 64  # nothing in between but counters


# --- nothing left behind ---


def probe() -> list[Any]:
    """Return what torch does by itself on a CPU, in all that the policy changes."""
    torch.manual_seed(1)
    x = torch.randn(2, 3, 8, 16, requires_grad=True)
    dropped, kept = saved_for_backward(F.dropout, x, 0.5)
    found: list[Any] = [kept, dropped.tolist()]
    found += [F.scaled_dot_product_attention(x, x, x, dropout_p=p).tolist() for p in (0.0, 0.5)]
    with torch.autocast("cpu", BF16):
        low = torch.linspace(0.1, 0.9, 12, dtype=BF16).view(3, 4)
        for run in IN_FP32.values():
            result = run(low)
            found += [result.dtype, result.float().tolist()]
    for optimizer in (torch.optim.SGD, torch.optim.Adagrad):
        parameter = nn.Parameter(torch.ones(4))
        parameter.grad = torch.ones(4)
        optimizer([parameter], lr=0.1, fused=True).step()
        found.append(parameter.tolist())
    return found


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("attention", ["fused", "math"])
def test_rules_end_after_an_exception(attention: str) -> None:
    before = probe()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), cuda_rules(attention):
            raise ZeroDivisionError
        assert probe() == before


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_rules_for_fused_optimizers_are_taken_back(optimizer: Any) -> None:
    with cuda_rules():
        pass
    with fake_mode():
        parameter = nn.Parameter(torch.empty(4))
        parameter.grad = torch.empty_like(parameter)
        made = optimizer([parameter], lr=0.1, fused=True)
        with pytest.raises(Exception, match="_fused_"):
            made.step()


def test_a_fit_that_fails_leaves_torch_as_it_was() -> None:
    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise ZeroDivisionError

    before = (nn.Module._apply, torch.Tensor.numpy, F.dropout(torch.ones(4, requires_grad=True)).grad_fn)
    with pytest.raises(ZeroDivisionError):
        capture(lambda: Fails(nn.Linear(16, 5)), vectors(2), {})
    after = (nn.Module._apply, torch.Tensor.numpy, F.dropout(torch.ones(4, requires_grad=True)).grad_fn)
    assert before[:2] == after[:2]
    assert type(before[2]) is type(after[2])
