"""A factorized embedding has V x E + E x H numbers, and a tied head computes with the same ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError
from lightning_solo.nn.factorizing import factorize_embedding, factorized, merge_factors
from lightning_solo.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_solo.techniques.factorized_embedding.technique import FactorizedEmbedding
from tests.conftest import long
from tests.messages import lines_with, mentions
from tests.models import small_batch, small_model
from tests.training import equal

Make = Callable[..., Any]
ROWS, WIDTH = 48, 16


class Words(nn.Module):
    """A language model, whose head may have the weight of its embedding."""

    def __init__(self, tied: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.places = nn.Embedding(ROWS, WIDTH, **options), nn.Embedding(8, WIDTH)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, ROWS)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.body(self.embedding(ids) + self.places(places)).relu())


class Model(L.LightningModule):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or Words()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def ids_of(rows: int = 24) -> Tensor:
    return torch.randint(ROWS, (rows, 9), generator=torch.Generator().manual_seed(1))


def fit(make_trainer: Make, *callbacks: Any, module: Any = None, ckpt: Any = None, **arguments: Any) -> Any:
    module = module or Model()
    trainer = make_trainer(L, callbacks=list(callbacks), **arguments)
    trainer.fit(module, DataLoader(ids_of(), batch_size=4), ckpt_path=ckpt, weights_only=ckpt and True)  # type: ignore[arg-type]
    return module


# --- the mechanism ---


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_those_of_both_factors(tied: bool) -> None:
    module = Words(tied)
    change = factorize_embedding(module, 4)
    assert sum(p.numel() for p in module.embedding.parameters()) == ROWS * 4 + 4 * WIDTH
    assert change.before - change.after == 4 * (ROWS * WIDTH - (ROWS * 4 + 4 * WIDTH))
    assert change.after == sum(p.nbytes for p in module.parameters())
    assert set(change.layers) == ({"embedding", "head"} if tied else {"embedding"})


def test_a_tied_head_computes_with_the_factors_of_its_embedding() -> None:
    module, ids = Words(), ids_of(3)[:, :8]
    change = factorize_embedding(module, 5)
    dense = Words()
    dense.embedding.weight.data = module.embedding.weight.detach()
    dense.head.weight = dense.embedding.weight
    assert torch.allclose(module(ids), dense(ids), atol=1e-5)
    assert torch.equal(module.head.weight, module.embedding.weight)
    module(ids).square().mean().backward()
    dense(ids).square().mean().backward()
    table, other = module.embedding.factors()
    assert torch.allclose(table.grad, dense.embedding.weight.grad @ other, atol=1e-5)  # of both uses
    assert torch.allclose(other.grad, dense.embedding.weight.grad.t() @ table, atol=1e-5)
    assert len([*module.parameters()]) == 6  # table, other, places, body's two, the head's bias
    merge_factors(module)
    assert module.head.weight is module.embedding.weight
    assert [*change.layers] == ["embedding", "head"]
    assert torch.allclose(module(ids), dense(ids), atol=1e-5)


@pytest.mark.parametrize("start", ["svd", "random"])
def test_padding_stays_zero(start: str) -> None:
    module = Words(padding_idx=3)
    with torch.no_grad():
        module.embedding.weight[3] = 0
    factorize_embedding(module, 4, start=start)
    assert module.embedding.padding_idx == 3
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    ids = torch.tensor([[3, 3, 5]])
    for _ in range(3):
        module.embedding(ids).sum().backward()
        optimizer.step()
    assert not module.embedding(ids)[0, 0].any()
    assert module.embedding(ids)[0, 2].any()


@pytest.mark.parametrize("kind", [long("T5"), long("GPT2"), long("Bert"), long("Llama")])
def test_models_of_transformers(kind: str) -> None:
    torch.manual_seed(0)
    task = {"T5": "ForConditionalGeneration", "Bert": "ForMaskedLM"}.get(kind, "ForCausalLM")
    model, batch = small_model(kind, task, tie_word_embeddings=True, vocab_size=1200).eval(), small_batch(2)
    keys = [*model.state_dict()]
    change = factorize_embedding(model, 4)
    assert len(change.layers) >= 2
    assert change.before - change.after == 4 * (1200 * 16 - 4 * (1200 + 16))
    loss = model(**batch).loss
    loss.backward()
    assert model.get_input_embeddings().factors()[0].grad.any()
    merge_factors(model)
    assert [*model.state_dict()] == keys
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.allclose(model(**batch).loss, loss, atol=1e-5)


# --- a fit ---


@pytest.mark.any_device
def test_a_fit_trains_the_factors_and_resumes(
    make_trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        whole = fit(make_trainer, FactorizedEmbedding(rank=4), max_epochs=2)
    assert lines_with(caplog.text, "factorized_embedding", "1 EmbeddingFactors, 1 HeadFactors", "rank 4")
    half = fit(make_trainer, FactorizedEmbedding(rank=4), max_epochs=1)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest = fit(make_trainer, FactorizedEmbedding(rank=4), max_epochs=2, ckpt=tmp_path / "half.ckpt")
    assert equal(whole, rest)
    assert rest.net.head[1].weight is rest.net.embedding[0].weight
    assert rest.net.head[0].weight is rest.net.embedding[1].weight
    assert {*factorized(rest)} == {"net.embedding", "net.head"}
    fit(make_trainer, module=Model(Words(tied=False))).trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match=mentions("callback.factorized_embedding")):
        fit(make_trainer, FactorizedEmbedding(rank=4), ckpt=tmp_path / "plain.ckpt")


def test_the_loss_in_chunks_is_that_of_the_factorized_head(make_trainer: Make) -> None:
    plain = fit(make_trainer, FactorizedEmbedding(rank=4))
    chunked = ChunkedCrossEntropy(chunk_tokens=8)
    module = fit(make_trainer, chunked, FactorizedEmbedding(rank=4))
    assert equal(plain, module, 1e-5)
    unlike = Model(Words(tied=False))
    assert not equal(plain.net.body, unlike.net.body, 1e-5)


def test_low_rank_and_factorized_embedding_merge_apart(make_trainer: Make, tmp_path: Path) -> None:
    callbacks = [solo.LowRank(rank=4), FactorizedEmbedding(rank=4, after_fit="merge")]
    module = fit(make_trainer, *callbacks)
    assert {*factorized(module)} == {"net.body"}
    assert module.net.head.weight is module.net.embedding.weight
    module.trainer.save_checkpoint(tmp_path / "both.ckpt")
    again = fit(make_trainer, *callbacks, ckpt=tmp_path / "both.ckpt")
    assert equal(again, module)


# --- refused ---


@pytest.mark.parametrize("rank", [12, 16, 64, 0.999999])
def test_a_rank_that_makes_the_table_no_smaller_is_refused(rank: int | float) -> None:
    with pytest.raises(PresetError, match=mentions(f"rank={rank}", "embedding.weight", "rank=11")):
        factorize_embedding(Words(), rank)


@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_with_other_gradients_are_refused(make_trainer: Make, options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(ConflictError, match=mentions("callback.factorized_embedding", name, "net.embedding.weight")):
        fit(make_trainer, FactorizedEmbedding(rank=4), module=Model(Words(tied=False, **options)))


def test_a_table_that_another_layer_reads_is_refused() -> None:
    module = Words()
    module.places = module.embedding
    module.other = nn.EmbeddingBag(ROWS, WIDTH)
    module.other.weight = module.embedding.weight
    with pytest.raises(ConflictError, match=mentions("other.weight", "EmbeddingBag")):
        factorize_embedding(module, 4)


def test_which_embedding_must_be_clear() -> None:
    module = Words(tied=False)
    module.places = nn.Embedding(ROWS, WIDTH)
    with pytest.raises(PresetError, match=mentions("embedding.weight", "places.weight", "embedding=embedding")):
        factorize_embedding(module, 4)
    assert {*factorize_embedding(copy.deepcopy(module), 4, "places").layers} == {"places"}
    with pytest.raises(NothingToDoError, match=mentions("embedding='placs'", "did you mean 'places'")):
        factorize_embedding(module, 4, "placs")


def test_nothing_to_do_is_refused(make_trainer: Make) -> None:
    with pytest.raises(NothingToDoError, match=mentions("callback.factorized_embedding.rank=64")):
        fit(make_trainer, FactorizedEmbedding())
    with pytest.raises(NothingToDoError, match=mentions("Linear", "~callback.factorized_embedding")):
        factorize_embedding(nn.Linear(3, 3), 1, option="callback.factorized_embedding")
