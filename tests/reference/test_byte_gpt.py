"""The byte GPT: a correct language model, of the sizes its configurations promise."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning_pytorch
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_solo.reference.byte_gpt import ByteGPT
from tests.messages import mentions

MODELS = Path(__file__).parents[2] / "conf/app/model"
# parameters at a context of 128: 12 width^2 + 13 width per block, (256 + 128) width, 2 width
SIZES = {
    "byte_gpt_tiny": 4 * (12 * 128**2 + 13 * 128) + 386 * 128,
    "byte_gpt_small": 6 * (12 * 384**2 + 13 * 384) + 386 * 384,
    "byte_gpt_124m": 15 * (12 * 832**2 + 13 * 832) + 386 * 832,
    "byte_gpt_1b": 20 * (12 * 2048**2 + 13 * 2048) + 386 * 2048,
    "byte_gpt_7b": 35 * (12 * 4096**2 + 13 * 4096) + 386 * 4096,
}
STATED = ["0.84M", "10.8M", "125M", "1.01B", "7.05B"]


def tiny(**arguments: Any) -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(**{"width": 32, "depth": 2, "heads": 2, "context": 16, "warmup_steps": 2, **arguments})


def batches(count: int, batch_size: int = 4, rest: int = 0) -> DataLoader[Tensor]:
    """Return a loader of repetitive windows of 17 bytes, with ``rest`` windows in a last, smaller batch."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(0, 7, (count * batch_size + rest, 1), generator=generator)
    return DataLoader(((starts + torch.arange(17)) % 7 + 97).to(torch.uint8), batch_size)  # type: ignore[arg-type]


def test_a_byte_changes_no_logits_before_it() -> None:
    model = tiny().eval()
    text = torch.randint(0, 256, (2, 16), dtype=torch.uint8)
    for changed in (0, 7, 15):
        other = text.clone()
        other[:, changed] += 1
        a, b = model(text), model(other)
        assert torch.equal(a[:, :changed], b[:, :changed])
        assert not torch.allclose(a[:, changed:], b[:, changed:])


@pytest.mark.parametrize("tie_weights", [True, False])
def test_first_loss_is_that_of_a_uniform_guess(tie_weights: bool) -> None:
    model = tiny(tie_weights=tie_weights)
    loss = model.loss(torch.randint(0, 256, (32, 17), dtype=torch.uint8))
    assert loss.item() == pytest.approx(math.log(256), rel=0.01)
    assert (model.head.weight is model.embedding.weight) == tie_weights


def test_branches_start_smaller_in_a_deeper_model() -> None:
    # 0.02 / sqrt(2 * depth); over 16,384 draws the deviation is known to better than 2 %
    for depth in (1, 8):
        weight = tiny(width=64, depth=depth).blocks[0].mlp.down.weight
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * depth), rel=0.02)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_it_learns_and_perplexity_is_exact_over_batches_of_different_sizes(make_trainer: Any, precision: Any) -> None:
    model, data = tiny(optimizer=partial(torch.optim.AdamW, lr=1e-2)), batches(10, rest=3)
    first = model.loss(next(iter(data))).item()
    trainer = make_trainer(lightning_pytorch, precision=precision, max_epochs=3)
    trainer.fit(model, data, data)
    assert trainer.callback_metrics["train/loss"] < first - 0.5
    for stage in ("validation", "test"):
        run = trainer.validate if stage == "validation" else trainer.test
        metrics = run(model, data, verbose=False)[0]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            logits = torch.cat([model(batch[:, :-1]).float() for batch in data])
        targets = torch.cat([batch[:, 1:] for batch in data]).long()
        expected = F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten()).item()
        assert metrics[f"{stage}/loss"] == pytest.approx(expected, rel=1e-4)
        assert metrics[f"{stage}/perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)


@pytest.mark.parametrize(("name", "stated"), [*zip(SIZES, STATED, strict=True)])
def test_configuration_has_the_size_it_states(name: str, stated: str) -> None:
    text = (MODELS / f"{name}.yaml").read_text()
    arguments = yaml.safe_load(text)
    assert arguments.pop("name") == "byte_gpt"
    assert arguments.pop("optimizer") == "${optimizer}"
    assert arguments.pop("context") == "${data.context}"
    with torch.device("meta"):
        model = ByteGPT(**arguments, context=128)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == SIZES[name]
    assert parameters == pytest.approx(float(stated[:-1]) * {"M": 1e6, "B": 1e9}[stated[-1]], rel=0.01)
    assert stated in text.splitlines()[0]


def test_the_schedule_ends_at_zero_after_the_last_step(make_trainer: Any) -> None:
    model = tiny(optimizer=partial(torch.optim.SGD, lr=1.0))
    trainer = make_trainer(lightning_pytorch, max_epochs=2, accumulate_grad_batches=3)
    rates = []
    model.on_train_batch_start = lambda batch, batch_idx: rates.append(trainer.optimizers[0].param_groups[0]["lr"])  # type: ignore[method-assign]
    trainer.fit(model, batches(9))
    # 2 epochs of 9 / 3 = 3 steps: warm-up 1/3, 2/3, then (1 + cos(0, pi/4, pi/2, 3 pi/4)) / 2, then 0
    expected = [1 / 3, 2 / 3, *(0.5 * (1 + math.cos(k * math.pi / 4)) for k in range(4))]
    assert rates == pytest.approx([rate for rate in expected for _ in range(3)])
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.0, 0.0]


def test_the_optimizer_given_is_used_without_decay_on_vectors(make_trainer: Any) -> None:
    model = tiny(optimizer=partial(torch.optim.SGD, lr=0.5, weight_decay=0.1))
    trainer = make_trainer(lightning_pytorch, limit_train_batches=1)
    trainer.fit(model, batches(1))
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, torch.optim.SGD)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [{p.dim() for p in group["params"]} for group in optimizer.param_groups] == [{2}, {1}]
    assert "optimizer" not in model.hparams


def test_generate_predict_and_reload(make_trainer: Any, tmp_path: Path) -> None:
    model = tiny(optimizer=partial(torch.optim.AdamW, lr=1e-2))
    trainer = make_trainer(lightning_pytorch, max_epochs=6)
    trainer.fit(model, batches(20))
    text = model.generate(b"abcdefgabc", 30)
    assert len(text) == 30
    assert text == model.generate(b"abcdefgabc", 30)
    assert sum(byte in b"abcdefg" for byte in text) > 25
    assert trainer.predict(model, batches(1))[0].shape == (4, 16)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    again = ByteGPT.load_from_checkpoint(tmp_path / "model.ckpt")
    assert again.generate(b"abcdefgabc", 30) == text


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match=mentions("width=30", "heads=4", "width=32")):
        ByteGPT(width=30, heads=4)
