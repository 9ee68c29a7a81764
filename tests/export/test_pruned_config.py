"""Models of transformers without some channels or heads are folders that transformers loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.errors import ConflictError
from lightning_solo.export.pruned_config import smaller_config
from tests.messages import mentions
from tests.models import small_batch, small_model

Make = Callable[..., Any]
GROUPED: dict[str, Any] = {"head_dim": 8, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


class Trained(L.LightningModule):
    """A model of transformers on one batch."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = small_model(kind, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def pruned(make_trainer: Make, kind: str, patterns: list[str], **options: Any) -> Trained:
    module = Trained(kind, **options)
    for pattern in patterns:
        trainer = make_trainer(L, callbacks=[solo.Pruning(amount=0.5, pattern=pattern)], max_steps=1)
        trainer.fit(module, DataLoader([small_batch()], batch_size=None))  # type: ignore[arg-type]
    return module


CASES: list[tuple[str, list[str], dict[str, Any], dict[str, int]]] = [
    ("Llama", ["channels", "heads"], GROUPED, {
        "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 32,
    }),
    ("Qwen2", ["heads"], {key: GROUPED[key] for key in GROUPED if key != "head_dim"}, {"num_attention_heads": 2}),
    ("GPT2", ["channels"], {}, {"n_inner": 32}),
    ("Phi3", ["channels"], {"num_attention_heads": 2, "num_key_value_heads": 2}, {"intermediate_size": 16}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "patterns", "options", "sizes"),
    [pytest.param(*case, id=case[0], marks=[pytest.mark.long] if number else []) for number, case in enumerate(CASES)],
)
def test_the_folder_has_the_smaller_sizes(
    kind: str, patterns: Any, options: Any, sizes: Any, make_trainer: Make, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    module = pruned(make_trainer, kind, patterns, **options)
    solo.export_pretrained(module, tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {name: getattr(loaded.config, name) for name in sizes} == sizes
    ids = small_batch()["input_ids"]
    assert torch.equal(loaded(ids).logits, module.model.eval()(ids).logits)


def test_sizes_that_no_configuration_can_say_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    module = pruned(make_trainer, "GPT2", ["heads"])
    with pytest.raises(ConflictError, match=mentions("format='hf'", "--format pruned")):
        smaller_config(module.model, module.model.state_dict(), module.pruned_structure)
    with pytest.raises(ConflictError, match=mentions("GPT2LMHeadModel", "callback.pruning", "--format pruned")):
        solo.export_pretrained(module, tmp_path / "model")
    assert not (tmp_path / "model").exists()
