"""Building splits what a module initialises by itself, bit for bit as if split at the end, and never holds it whole."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.modules.module as torch_module
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_solo.optim import split_weights
from lightning_solo.optim.building import Building
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.split_weights import split_parameters
from tests.modules import Stack

Make = Callable[[], nn.Module]


def built(make: Make, bits: int = 24, *, meta: bool = False, window_bytes: int = 0) -> tuple[nn.Module, Building]:
    """Return what ``make`` makes under a narrow window: each parameter is closed as soon as another is touched."""
    torch.manual_seed(0)
    with Building(bits, window_bytes=window_bytes) as building, torch.device("meta") if meta else nullcontext():
        module = make()
    return module, building


def assert_as_split_at_the_end(make: Make, bits: int = 24, **how: Any) -> nn.Module:
    torch.manual_seed(0)
    plain = make()
    behind = torch.rand(1)
    corrections = split_parameters(materialised(plain), bits)
    module, building = built(make, bits, **how)
    assert torch.equal(torch.rand(1), behind)  # as many random numbers
    assert list(module.state_dict()) == list(plain.state_dict())
    for p, q in zip(materialised(module), materialised(plain), strict=True):
        assert (p.dtype, p.device, p.stride(), p.requires_grad) == (q.dtype, q.device, q.stride(), q.requires_grad)
        assert torch.equal(p, q)
        if q in corrections:
            assert torch.equal(building.corrections[p], corrections[q])
    assert len(building.corrections) == len(corrections)
    for ours, theirs in zip(module.buffers(), plain.buffers(), strict=True):
        assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)
        assert torch.equal(ours, theirs)
    return module


def materialised(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if not nn.parameter.is_lazy(p)]


class Own(nn.Module):
    """Initialises by `apply`, by name, through views and ``.data``, and ties."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16, padding_idx=3)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.scale = nn.Parameter(torch.randn(7))
        self.register_buffer("steps", torch.arange(5) / 3)
        self.apply(self.initialise)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.data.uniform_(-1, 1)
            elif name.endswith("2.weight"):
                nn.init.trunc_normal_(p, std=0.01)
        with torch.no_grad():
            self.blocks[0].weight.copy_(torch.eye(16) / 3)
            torch._foreach_copy_([self.blocks[1].weight, self.scale], [torch.ones(16, 16) / 7, torch.ones(7) / 9])
        self.head.weight = self.tokens.weight

    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
        assert all(p.dtype == torch.float32 and not p.is_meta for p in module.parameters())


def parameters_of_all_kinds() -> nn.Module:
    module = nn.Module()
    module.several = nn.ParameterList([nn.Parameter(torch.randn(7, 5)) for _ in range(3)])
    module.named = nn.ParameterDict({"x": nn.Parameter(torch.rand(3), requires_grad=False)})
    module.part = nn.Parameter(torch.randn(4, 4)[:, :2])
    module.turned = nn.Parameter(torch.randn(4, 6).t())
    module.repeated = nn.Parameter(torch.ones(1).expand(5))
    module.empty = nn.Parameter(torch.empty(0, 3))
    module.doubled = nn.Linear(3, 3, dtype=torch.float64)
    module.halved = nn.Linear(3, 3).to(torch.bfloat16)
    return module


def views_that_are_written_to_late() -> nn.Module:
    module = nn.Module()
    module.a = nn.Linear(8, 8)
    row, whole = module.a.weight.data[2], module.a.bias.detach().numpy()
    module.b, module.c = nn.Linear(8, 8), nn.Linear(8, 8)
    row.normal_()
    whole[:] = 1 / 3
    del row, whole
    module.d = nn.Linear(8, 8)
    return module


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ConvTranspose2d(16, 8, 3), nn.PReLU())


def layers() -> nn.Module:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
    return nn.ModuleList([nn.LSTM(8, 16, 2, bidirectional=True), nn.MultiheadAttention(16, 4), encoder])


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 5))


@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize(
    "make", [Stack, Own, parameters_of_all_kinds, views_that_are_written_to_late, convolutions, layers, lazy]
)
def test_bit_for_bit_as_split_at_the_end(make: Make, bits: int, meta: bool) -> None:
    assert_as_split_at_the_end(make, bits, meta=meta)


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"]
)
def test_transformers_that_are_made_from_a_config(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    if name.startswith("T5"):
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    tokens = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
    make = lambda: kind(kind.config_class(**sizes, **tokens))  # noqa: E731
    for meta in (False, True):
        module = assert_as_split_at_the_end(make, meta=meta)
        assert module.get_output_embeddings().weight.dtype == torch.bfloat16


def test_weights_that_transformers_loads(tmp_path: Path) -> None:
    """It builds on "meta" by itself, for what it reads from a file."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    saved = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, **sizes))
    saved.save_pretrained(tmp_path)
    module, building = built(lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path), 32)
    assert len(building.corrections) == len(list(saved.parameters()))
    building.join()
    for left, right in ((module.parameters(), saved.parameters()), (module.buffers(), saved.buffers())):
        assert all(torch.equal(p, q) for p, q in zip(left, right, strict=True))


def test_parametrizations() -> None:
    """These read and change a weight: exact with 32 bits, and with 24 as long as it is open."""

    def make() -> nn.Module:
        return nn.Sequential(
            parametrizations.weight_norm(nn.Linear(16, 8)), parametrizations.spectral_norm(nn.Linear(8, 8))
        )

    assert_as_split_at_the_end(make, 32)
    assert_as_split_at_the_end(make, 24, window_bytes=2**20)


# --- what is asked of it in any order ---

KINDS = (
    *("normal", "scale", "copy", "add", "data", "view", "write", "drop"),
    *("tie", "alias", "share", "new", "freeze"),
)
OPERATIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 3)), max_size=12)


@torch.no_grad()
def by(operations: list[tuple[str, int, int]]) -> nn.ParameterList:
    """Return four parameters after operations on them."""
    own = nn.ParameterList([nn.Parameter(torch.randn(3, 4)) for _ in range(4)])
    held: dict[int, Tensor] = {}
    for name, i, j in operations:
        match name:
            case "normal":
                own[i].normal_()
            case "scale":
                own[i].mul_(1 / 3)
            case "copy":
                own[i].copy_(own[j])
            case "add":
                torch._foreach_add_([own[i], own[j]], 0.1)
            case "data":
                own[i].data = own[j].data.t().contiguous().t() / 3
            case "view":
                held[i] = own[i].data[j % 3]
            case "write":
                for view in held.values():
                    view.uniform_()
            case "drop":
                held.clear()
            case "tie":
                own[i] = own[j]
            case "alias":
                own[i] = nn.Parameter(own[j])
            case "share":
                own[i].data = own[j].data
            case "new":
                own[i] = nn.Parameter(torch.rand(2, 6).view(3, 4))
            case "freeze":
                own[i].requires_grad_(False)
    return own


@given(OPERATIONS)
def test_operations_in_any_order(operations: list[tuple[str, int, int]]) -> None:
    assert_as_split_at_the_end(lambda: by(operations), 32)


# --- memory ---


class Live(TorchDispatchMode):
    """Counts the bytes of fp32 storages that live, and of all."""

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[bool, int] = {True: 0, False: 0}
        self.peak: dict[bool, int] = dict(self.now)
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.count(tensor.untyped_storage(), tensor.dtype == torch.float32)
        return result

    def count(self, storage: Any, fp32: bool) -> None:
        key, size = storage._cdata, storage.nbytes()
        if not size or key in self.seen:
            return
        self.seen.add(key)
        kinds = [False, True] if fp32 else [False]

        def gone() -> None:
            self.seen.discard(key)
            for kind in kinds:
                self.now[kind] -= size

        weakref.finalize(storage, gone)
        for kind in kinds:
            self.now[kind] += size
            self.peak[kind] = max(self.peak[kind], self.now[kind])


@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_memory_of_fp32_weights_is_the_window(monkeypatch: pytest.MonkeyPatch, meta: bool) -> None:
    """20 blocks of 2 x 16,384 weights and 448 others, and a head: 664,385 parameters."""
    monkeypatch.setitem(split_weights.CHUNK, "cpu", 1024)
    n, largest, window = 20 * (2 * 16384 + 448) + 65, 4 * 16384, 4 * 40000
    with Live() as plain:
        module = Stack(blocks=20, width=64)
    assert sum(p.numel() for p in module.parameters()) == n
    assert plain.peak[True] == plain.now[True] == 4 * n  # without "meta"
    del module
    with Live() as live:
        module, building = built(lambda: Stack(blocks=20, width=64), meta=meta, window_bytes=window)
    work = 32 * 1024  # of a chunk while it is split
    assert live.peak[True] <= window + largest + work
    assert live.peak[False] <= 3 * n + window + largest + work
    assert live.now[True] == 0
    assert live.now[False] == 3 * n  # bf16 weight 2 + correction 1
    assert len(building.corrections) == len(list(module.parameters()))


def test_memory_of_what_is_dropped_while_building() -> None:
    def make() -> nn.Module:
        module = nn.Module()
        module.first, module.second = nn.Linear(64, 64), nn.Linear(64, 64)
        module.second.weight = module.first.weight
        gone.append(weakref.ref(nn.Linear(64, 64).weight))
        return module

    gone: list[Any] = []
    module, building = built(make)
    assert len(building.corrections) == 3
    assert gone[0]() is None
    assert module.second.weight is module.first.weight


# --- as a context ---


@pytest.fixture(autouse=True)
def leaves_no_hooks() -> Iterator[None]:
    yield
    assert not torch_module._global_parameter_registration_hooks
    assert not torch_module._global_module_registration_hooks
    assert not torch.overrides._get_current_function_mode_stack()


def test_the_window_closes_the_oldest() -> None:
    def kinds() -> list[torch.dtype]:
        with torch._C.DisableTorchFunction():
            return [p.dtype for p in parts]

    with Building(24, window_bytes=2 * 4 * 16):
        parts = nn.ParameterList([nn.Parameter(torch.randn(16)) for _ in range(3)])
        assert kinds() == [torch.bfloat16, torch.float32, torch.float32]
        assert parts[0].shape == (16,)
        assert parts[0].requires_grad
        assert kinds()[0] == torch.bfloat16  # which needed nothing of it
        assert parts[0].dtype == torch.float32
        assert kinds() == [torch.float32, torch.bfloat16, torch.float32]
    assert kinds() == [torch.bfloat16] * 3


def test_the_window_comes_back_to_what_others_held() -> None:
    with Building(24, window_bytes=0), torch._C.DisableTorchFunction():
        tensors = [torch.randn(16) for _ in range(3)]
        parts = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])
        assert {p.dtype for p in parts} == {torch.float32}  # which `tensors` shares
        tensors.clear()
        nn.Linear(4, 4)
        assert {p.dtype for p in parts} == {torch.bfloat16}


def test_in_fp32_whatever_the_default() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        module, building = built(Stack, 32)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    building.join()
    torch.manual_seed(0)
    assert torch.equal(module.head.weight, Stack().head.weight)


def test_what_is_asked_for_on_meta_is_made_where_it_would_be() -> None:
    for around in (nullcontext(), torch.device("cpu"), torch.device("meta")):
        with around, Building():
            assert nn.Linear(2, 2, device="meta").weight.device.type == "cpu"
            with torch.device("meta"):
                assert torch.zeros(3).tolist() == [0, 0, 0]
                assert nn.Linear(2, 2, device="cpu").weight.device.type == "cpu"
            assert torch.zeros(3).to("meta").is_meta  # who moves something there means it
            assert torch.zeros(3).to(device="meta").is_meta
    with torch.device("meta"):
        assert torch.zeros(3).is_meta


def test_a_default_device_of_meta() -> None:
    with Building() as building:
        torch.set_default_device("meta")
        try:
            layer = nn.Linear(2, 2)
        finally:
            torch.set_default_device(None)
    assert layer.weight.device.type == "cpu"
    assert layer.weight in building.corrections


def test_modules_that_their_own_code_empties() -> None:
    def make() -> nn.Module:
        skipped = nn.utils.skip_init(nn.Linear, 8, 8)
        with torch.device("meta"):
            emptied = nn.Linear(8, 8)
        emptied.to_empty(device="cpu")
        for layer in (skipped, emptied):
            nn.init.constant_(layer.weight, 1 / 3)
            nn.init.constant_(layer.bias, 1 / 7)
        return nn.Sequential(skipped, emptied)

    module, building = built(make)
    plain = make()
    corrections = split_parameters(plain.parameters(), 24)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(building.corrections[p], corrections[q])


def test_only_what_is_to_be_split() -> None:
    with Building(24, splits=lambda p: p.dim() > 1) as building:
        layer = nn.Linear(3, 3)
        other = nn.Linear(3, 3, dtype=torch.bfloat16)
    assert (layer.weight.dtype, layer.bias.dtype) == (torch.bfloat16, torch.float32)
    assert list(building.corrections) == [layer.weight]
    assert other.weight.dtype == torch.bfloat16


def test_entered_again_for_loading() -> None:
    """Weights that are loaded come with their own corrections; what is written elsewhere, with none."""
    module, building = built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 32)
    torch.manual_seed(5)
    other = nn.Linear(4, 4)
    with torch.no_grad():
        module[1].weight.copy_(other.weight)  # behind its back
    with building:
        module[0].load_state_dict(other.state_dict())
    module[1].bias.data = other.bias.data.bfloat16()
    assert [bool(lower.any()) for lower in map(building.corrections.get, module.parameters())] == [1, 1, 0, 0]
    building.join()
    assert torch.equal(module[0].weight, other.weight)
    assert torch.equal(module[0].bias, other.bias)
    assert torch.equal(module[1].weight, other.weight.bfloat16().float())
    assert torch.equal(module[1].bias, other.bias.bfloat16().float())
    assert not building.corrections


def test_parameters_that_others_made_something_else() -> None:
    module, building = built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 32)
    module[0].float()
    module[1].weight.data = torch.ones(2, 2).bfloat16()
    assert list(building.corrections) == [module[1].bias]
    building.join()
    assert [p.dtype for p in module.parameters()] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]


def test_left_by_an_exception_all_is_fp32() -> None:
    torch.manual_seed(0)
    plain = Stack()
    made = nn.Module()

    def fail() -> None:
        made.stack = Stack()
        raise KeyError("mine")

    torch.manual_seed(0)
    with Building(32, window_bytes=0) as building, torch.device("meta"), pytest.raises(KeyError, match="mine"):
        fail()
    assert made.stack.head.weight.dtype == torch.bfloat16  # it didn't leave
    torch.manual_seed(0)
    with pytest.raises(KeyError, match="mine"), Building(32, window_bytes=0) as building, torch.device("meta"):
        fail()
    for p, q in zip(made.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not building.corrections
    made.stack(torch.ones(2, 8)).sum().backward()


def test_another_thread_builds_its_own() -> None:
    made = []
    with Building(window_bytes=0):
        thread = threading.Thread(target=lambda: made.append(Stack()))
        thread.start()
        thread.join()
    assert {p.dtype for p in made[0].parameters()} == {torch.float32}


def test_copies_are_seen_when_they_are_put_into_a_module() -> None:
    with Building(window_bytes=0) as building:
        layer = nn.Linear(4, 4)
        module = nn.ModuleList([copy.deepcopy(layer) for _ in range(3)])
    assert len(building.corrections) == 8
    assert torch.equal(module[2].weight, layer.weight)


def test_the_optimizer_takes_it_from_there() -> None:
    module, building = built(Stack, meta=True)
    optimizer = CompactAdamW(module.parameters(), corrections=building.corrections)
    torch.manual_seed(0)
    for p, q in zip(module.parameters(), Stack().parameters(), strict=True):
        torch.testing.assert_close(optimizer.master_weight(p), q.detach(), rtol=2**-15, atol=0)
