"""Models that keep the documents of a row apart pass, and those that don't are refused by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.data.packing import TwoDocuments, packed_loader, two_documents
from lightning_solo.errors import ConflictError
from lightning_solo.nn.document_boundaries import caching_configs, require_boundaries
from tests.messages import mentions
from tests.models import small_model
from tests.modules import documents

VOCABULARY = 61


def pair(rows: int | None = None) -> TwoDocuments:
    return two_documents(packed_loader(documents([12, 9, 7, 5, 8, 4], VOCABULARY), capacity=22, rows=rows))


def model(kind: str = "Llama", implementation: str = "eager") -> Any:
    torch.manual_seed(1)
    options = {"attention_types": [[["global", "local", "global"], 1]]} if kind == "GPTNeo" else {}
    return small_model(kind, vocab_size=VOCABULARY, use_cache=False, attn_implementation=implementation, **options)


class Cumulative(nn.Module):
    """A model whose tokens see all before them, whatever their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids).cumsum(1))


class Plain(Cumulative):
    """A model that takes no positions, but numbers its tokens."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        places = torch.arange(input_ids.shape[1]) / input_ids.shape[1]
        return self.head(self.embedding(input_ids) + places[:, None])


def mean_loss(logits: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def of_hugging_face(net: nn.Module) -> Any:
    return lambda batch: net(**batch).loss


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_cache_is_what_lets_documents_see_one_another(implementation: str, dtype: torch.dtype) -> None:
    tried, net = pair(), model("Llama", implementation).to(dtype)
    rounding = 2e-2 if dtype == torch.bfloat16 else 1e-3
    require_boundaries(net, of_hugging_face(net), tried, rounding)
    assert caching_configs(net) == []
    net.config.use_cache = True
    assert caching_configs(net) == [net.config]
    with pytest.raises(ConflictError, match=mentions("LlamaForCausalLM", "position_ids", "rows=1", "similar length")):
        require_boundaries(net, of_hugging_face(net), tried, rounding)


class Attending(nn.Module):
    """A model of one's own, whose attention stops where positions restart, or doesn't."""

    def __init__(self, stops: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.head, self.stops = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), stops

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)[:, None]
        document = (position_ids == 0).cumsum(1)
        mask = torch.ones(input_ids.shape[1], input_ids.shape[1]).tril().bool()
        if self.stops:
            mask = mask & (document[:, :, None] == document[:, None, :])[:, None]
        return self.head(nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, mask)[:, 0])


def test_a_model_of_ones_own_passes_where_its_attention_stops() -> None:
    def tried(net: nn.Module) -> None:
        require_boundaries(net, lambda b: mean_loss(net(b["input_ids"], b["position_ids"]), b), pair(2), 1e-5)

    tried(Attending(stops=True))
    with pytest.raises(ConflictError, match=mentions("Attending", "similar length")):
        tried(Attending(stops=False))


@pytest.mark.parametrize(
    ("kind", "implementations"),
    [
        *((kind, ["eager", "sdpa"]) for kind in ("Llama", "GPT2", "Qwen2", "Mistral", "GPTNeoX", "Phi", "Mixtral")),
        ("Gemma2", ["eager"]),
        ("GPTNeo", ["eager"]),
    ],
)
def test_these_keep_documents_apart(kind: str, implementations: list[str]) -> None:
    for implementation in implementations:
        net = model(kind, implementation)
        for rows in (1, 2):
            require_boundaries(net, of_hugging_face(net), pair(rows), 1e-5)


@pytest.mark.parametrize("kind", ["Falcon", "OPT", "Bloom", "Mamba"])
def test_these_take_positions_for_nothing(kind: str) -> None:
    net = model(kind)
    with pytest.raises(ConflictError, match=mentions(f"{kind}ForCausalLM", "position_ids", "similar length")):
        require_boundaries(net, of_hugging_face(net), pair())


def test_what_sees_all_tokens_or_numbers_them_through_is_refused_by_name() -> None:
    tried, leaking, plain = pair(), Cumulative(), Plain()
    with pytest.raises(ConflictError, match=mentions("Cumulative", "taking position_ids", "similar length")):
        require_boundaries(leaking, lambda b: mean_loss(leaking(b["input_ids"], b["position_ids"]), b), tried)
    with pytest.raises(ConflictError, match=mentions("Plain", "alone in a row", "position_ids", "similar length")):
        require_boundaries(plain, lambda b: mean_loss(plain(b["input_ids"]), b), tried)


def test_a_sum_over_labels_is_refused_and_a_mean_over_rows_too() -> None:
    net, tried = model(), pair()
    for wrong in (
        lambda batch: net(**batch).loss / batch["labels"].numel(),
        lambda batch: net(**batch).loss * batch["labels"].shape[1],
    ):
        with pytest.raises(ConflictError, match=mentions("mean over all labels")):
            require_boundaries(net, wrong, tried)


def test_rounding_that_depends_on_other_tokens_is_none_of_attention() -> None:
    net, tried = model(), pair()
    first = int(tried.in_row["input_ids"][0, 0])

    def rounded(error: float) -> Any:
        return lambda batch: net(**batch).loss * (1 + error * (batch["input_ids"][0, 0] == first))

    require_boundaries(net, rounded(3e-6), tried)  # as experts do, whose batches are of other sizes
    with pytest.raises(ConflictError, match=mentions("LlamaForCausalLM", "position_ids")):
        require_boundaries(net, rounded(3e-4), tried)


def test_the_comparison_leaves_no_trace() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.drop = model(), nn.Dropout(0.5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, batch: Any) -> Tensor:
            self.calls += 1
            assert not torch.is_grad_enabled()
            assert not any(part.training for part in self.modules())
            noise = torch.rand(()) + random.random()
            return self.drop(self.net(**batch).loss) + noise

    counting = Counting()
    counting.net.model.eval()
    before = [part.training for part in counting.modules()]
    state, python = torch.get_rng_state(), random.getstate()
    require_boundaries(counting, counting, pair())
    assert [part.training for part in counting.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert counting.calls == 0
    assert all(p.grad is None for p in counting.parameters())
