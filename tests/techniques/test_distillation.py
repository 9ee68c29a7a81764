"""Distillation adds the divergence from a teacher, which is nowhere in the module, its optimizer and checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError
from lightning_solo.export.soft_labels import write_soft_labels
from lightning_solo.nn.divergence import divergence, divergence_from_draws
from lightning_solo.nn.teacher import Call, Calls, counted_positions, labels_of_losses
from lightning_solo.optim.schedules import factor_at
from lightning_solo.presets.compose import compose
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_solo.techniques.distillation.technique import Distillation
from tests.conftest import long
from tests.messages import mentions
from tests.models import small_model
from tests.modules import Classifier, Stack, classification, loader, regression
from tests.training import equal, fit

Make = Callable[..., Any]
WORDS = 256


def gpt(width: int = 16, seed: int = 1, **options: Any) -> ByteGPT:
    torch.manual_seed(seed)
    return ByteGPT(**{"width": width, "depth": 2, "heads": 2, "context": 8, **options})


def texts(batches: int = 4) -> Any:
    rows = torch.randint(WORDS, (4 * batches, 9), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    return torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


class Losses(L.Callback):
    """Notes the logged parts and the loss of each batch."""

    def __init__(self) -> None:
        self.parts: list[tuple[float, float, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = trainer.callback_metrics
        names = ("distillation/divergence", "distillation/own_loss")
        self.parts.append((*(float(logged[name]) for name in names), float(outputs["loss"])))  # type: ignore[arg-type]


# --- acted ---


def test_loss_is_that_of_a_loop_by_hand(make_trainer: Make) -> None:
    student, teacher = gpt(), gpt(24, seed=2)
    reference = gpt()
    losses = Losses()
    technique = Distillation.from_module(copy.deepcopy(teacher), alpha=0.3, temperature=2.0)
    fit(make_trainer, technique, losses, module=student, data=texts())
    groups = [{"params": [p for p in reference.parameters() if p.dim() >= 2]}]
    groups.append({"params": [p for p in reference.parameters() if p.dim() < 2], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    for step, batch in enumerate(texts()):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * factor_at(step, warmup_steps=50, total_steps=4)
        logits = reference(batch[:, :-1]).flatten(0, 1)
        wanted = (teacher(batch[:, :-1]).detach().flatten(0, 1) / 2).log_softmax(-1)
        own = F.cross_entropy(logits, batch[:, 1:].flatten().long())
        kl = 4 * F.kl_div((logits / 2).log_softmax(-1), wanted, log_target=True, reduction="batchmean")
        loss = 0.7 * own + 0.3 * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert losses.parts[step] == pytest.approx(tuple(float(each.detach()) for each in (kl, own, loss)), rel=1e-5)
    assert losses.parts[0][0] > 1e-3
    for name, p in reference.named_parameters():
        assert torch.allclose(p, student.get_parameter(name), atol=1e-5), name


def test_alpha_of_one_computes_no_backward_of_the_own_loss(make_trainer: Make) -> None:
    seen: list[Tensor] = []

    class Watched(ByteGPT):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            loss.register_hook(seen.append)
            return loss

    for alpha, times in ((1.0, 0), (0.5, 4)):
        seen.clear()
        torch.manual_seed(1)
        student = Watched(width=16, depth=1, heads=2, context=8)
        fit(make_trainer, Distillation.from_module(gpt(24), alpha=alpha), module=student, data=texts())
        assert len(seen) == times


def test_a_module_s_own_dict_is_kept(make_trainer: Make) -> None:
    class Returns(ByteGPT):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "bytes": batch.numel()}

    class Watch(L.Callback):
        outputs: Any = None

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            self.outputs = outputs

    watch, losses = Watch(), Losses()
    torch.manual_seed(1)
    student = Returns(width=16, depth=1, heads=2, context=8)
    fit(make_trainer, Distillation.from_module(gpt(24)), watch, losses, module=student, data=texts())
    assert watch.outputs["bytes"] == 36
    assert losses.parts[-1][2] == pytest.approx((losses.parts[-1][0] + losses.parts[-1][1]) / 2)


# --- parity ---


def test_equal_logits_give_zero_and_no_gradient() -> None:
    logits = (5 * torch.randn(3, 7, 11)).requires_grad_()
    loss = divergence(logits, logits.detach().clone(), 1.5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
def test_divergence_is_torch_s(temperature: float) -> None:
    torch.manual_seed(2)
    student, teacher = torch.randn(3, 700, 12).requires_grad_(), torch.randn(3, 700, 12)  # more than 1,024 rows
    counted = torch.rand(3, 700) < 0.6
    other = student.detach().clone().requires_grad_()
    log_q, log_p = ((x[counted] / temperature).log_softmax(-1) for x in (other, teacher))
    expected = temperature**2 * F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    actual = divergence(student, teacher, temperature, counted)
    (3 * actual).backward()  # type: ignore[no-untyped-call]
    (3 * expected).backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(actual, expected, rtol=1e-5)
    assert torch.allclose(student.grad, other.grad, rtol=1e-4, atol=1e-7)  # type: ignore[arg-type]
    assert torch.equal(student.grad[~counted], torch.zeros_like(student)[~counted])  # type: ignore[index]


def test_words_that_the_teacher_rules_out_count_nothing() -> None:
    student = torch.randn(2, 5).requires_grad_()
    teacher = torch.randn(2, 5)
    teacher[:, 3] = -math.inf
    loss = divergence(student, teacher)
    loss.backward()  # type: ignore[no-untyped-call]
    p = teacher.softmax(-1)
    expected = (p * (p.clamp(min=1e-30).log() - student.detach().log_softmax(-1))).sum(-1).mean()
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_no_counted_position_gives_zero_with_a_graph() -> None:
    logits = torch.randn(2, 3, 4, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for loss in (
        divergence(logits, torch.randn(2, 3, 4), counted=nothing),
        divergence_from_draws(logits, torch.zeros(2, 3, 1), torch.zeros(2, 3), nothing),
    ):
        loss.backward()  # type: ignore[no-untyped-call]
        assert float(loss.detach()) == 0.0
        assert torch.equal(logits.grad, torch.zeros_like(logits))  # type: ignore[arg-type]


def test_draws_give_the_divergence_on_average() -> None:
    torch.manual_seed(3)
    student, teacher = torch.randn(50, 6).requires_grad_(), torch.randn(50, 6)
    p = teacher.softmax(-1)
    drawn = torch.multinomial(p, 20000, replacement=True)
    exact = divergence(student, teacher)
    (by_exact,) = torch.autograd.grad(exact, student)
    estimate = divergence_from_draws(student, drawn, -(p * p.log()).sum(-1))
    (by_draws,) = torch.autograd.grad(estimate, student)
    assert float(estimate.detach()) == pytest.approx(float(exact.detach()), abs=2e-3)
    assert torch.allclose(by_draws, by_exact, atol=5e-4)
    assert by_exact.abs().max() > 5e-3


@pytest.mark.parametrize("shifted", [False, True])
def test_positions_are_those_that_the_own_loss_counts(shifted: bool) -> None:
    labels = torch.tensor([[1, -100, 2, 3], [-100, -100, 4, -100]])
    logits = torch.randn(2, 4, 9)
    call = Call("", (), {}, logits)
    with labels_of_losses() as seen:
        if shifted:
            F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        else:
            nn.CrossEntropyLoss()(logits.transpose(1, 2), labels)
    counted = counted_positions(call, seen, None)
    assert counted is not None
    expected = F.pad(labels[:, 1:], (0, 1), value=-100) if shifted else labels
    assert torch.equal(counted, expected != -100)
    # without a cross-entropy of torch's: by the labels of a causal model, else by the mask
    batch = {"labels": labels, "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])}
    by_labels = counted_positions(call, [], batch)
    assert torch.equal(by_labels, F.pad(labels[:, 1:], (0, 1), value=-100) != -100)  # type: ignore[arg-type]
    by_mask = counted_positions(
        Call("", (batch["attention_mask"],), {}, logits), [], {"attention_mask": batch["attention_mask"]}
    )
    assert torch.equal(by_mask, batch["attention_mask"] == 1)  # type: ignore[arg-type]
    assert counted_positions(call, [], batch["labels"]) is None


def test_only_outermost_calls_are_recorded() -> None:
    net = Classifier()
    calls = Calls({"": net, "blocks": net.blocks, "head": net.head})
    x = torch.randn(4, 8)
    with calls.recording() as recorded:
        net(x)
        net.head(x)
        assert [call.name for call in recorded] == ["", "head"]
        assert torch.equal(recorded[0].args[0], x)
    net(x)
    with calls.recording() as recorded:
        assert recorded == []
    calls.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


@pytest.mark.long
def test_teacher_in_bf16_is_near_that_in_fp32(make_trainer: Make) -> None:
    parts = []
    for dtype in ("auto", "bfloat16"):
        losses, student = Losses(), gpt()
        technique = Distillation.from_module(gpt(24, seed=2), dtype=dtype)
        fit(make_trainer, technique, losses, module=student, data=texts())
        parts.append(losses.parts[0][0])
    assert parts[0] != parts[1]
    assert parts[0] == pytest.approx(parts[1], rel=0.05)


@pytest.mark.long
def test_teacher_runs_in_evaluation_and_the_student_s_dropout_as_without(make_trainer: Make) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Classifier(dropout=0.5)
            self.modes: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            self.modes.append((self.net.training, torch.is_grad_enabled()))
            return self.net(x)

    def student() -> Any:
        torch.manual_seed(4)
        return classification(L, Classifier(dropout=0.5))

    teacher, losses = Looks(), Losses()
    fit(make_trainer, Distillation.from_module(teacher, alpha=1e-9), losses, module=student())
    assert set(teacher.modes) == {(False, False)}
    alone: list[float] = []

    class Alone(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            alone.append(float(outputs["loss"]))

    fit(make_trainer, Alone(), module=student())
    assert [own for _, own, _ in losses.parts] == pytest.approx(alone, rel=1e-4)


@pytest.mark.long
def test_a_model_of_transformers_is_asked_with_the_inputs_of_the_student_s(make_trainer: Make, tmp_path: Path) -> None:
    small_model("Llama").save_pretrained(tmp_path / "teacher")

    class Causal(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.model = small_model("Llama")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(**batch).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    student, teacher = Causal(), small_model("Llama").eval()
    ids = torch.randint(teacher.config.vocab_size, (2, 6), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    batch["labels"][:, :3] = -100
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        stored = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
        wanted, own = (model(input_ids=ids).logits[:, 2:5].log_softmax(-1) for model in (stored, student.model))
        expected = F.kl_div(own.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean")
    losses = Losses()
    technique = Distillation(str(tmp_path / "teacher"))
    fit(make_trainer, technique, losses, module=student, data=torch.utils.data.DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    assert float(expected) > 1e-4
    assert losses.parts[0][0] == pytest.approx(float(expected), rel=1e-4)


class Words(L.LightningModule):
    """A language model of torch's own parts."""

    def __init__(self, width: int = 8, cap: float = 3.0) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.words, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.cap = cap
        for p in self.head.parameters():
            p.data *= 5

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.words(x)) / self.cap).tanh() * self.cap  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        labels = batch[:, 1:].masked_fill(batch[:, 1:] < 5, -100)
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), labels.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def sentences() -> Any:
    return torch.utils.data.DataLoader(torch.randint(50, (12, 9), generator=torch.Generator().manual_seed(5)), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("of_labels", [long(False), True])
def test_divergence_is_chunked_with_the_cross_entropy(make_trainer: Make, tmp_path: Path, of_labels: bool) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False}
    write_soft_labels(Words(), sentences(), Words(16), tmp_path / "labels", **options)
    runs: list[Any] = []
    for chunks in (None, ChunkedCrossEntropy(chunk_tokens=7)):
        losses, student = Losses(), Words()
        by_labels = Distillation(labels=str(tmp_path / "labels"))
        technique = by_labels if of_labels else Distillation.from_module(Words(16), temperature=2.0)
        sizes: list[int] = []
        with LargestLogits(sizes):
            fit(make_trainer, technique, chunks, losses, module=student, data=sentences())
        runs.append((losses.parts, student, max(sizes)))
    (whole, one, all_rows), (chunked, other, rows) = runs
    assert (all_rows, rows) == (32, 7)
    assert whole[0][0] > 0.05
    assert chunked == [pytest.approx(each, rel=1e-5) for each in whole]
    for name, p in one.named_parameters():
        assert torch.allclose(p, other.get_parameter(name), atol=1e-5), name
        assert not torch.equal(p, Words().get_parameter(name))


class LargestLogits(TorchDispatchMode):
    """Notes the rows of all tensors with a row of 50 logits for each."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.dim() >= 2 and each.shape[-1] == 50 and each.is_floating_point():
                self.sizes.append(each.numel() // 50 if each.shape[0] not in (8, 16) else 0)  # not of the weight
        return result


@pytest.mark.any_device
def test_streamed_teacher_has_the_same_outputs_and_two_blocks_on_the_device(
    make_trainer: Make, device: torch.device
) -> None:
    parts, rings = [], []
    for streamed in (False, True):
        losses, teacher = Losses(), gpt(32, seed=2, depth=5)

        class Watch(L.Callback):
            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                ring = technique._teacher.ring  # type: ignore[union-attr]  # noqa: B023
                rings.append(ring and (ring.copies, ring.host_bytes, ring.device_bytes))

        technique = Distillation.from_module(teacher, streamed=streamed)
        fit(make_trainer, technique, losses, Watch(), module=gpt(), data=texts())
        parts.append(losses.parts)
        assert not any("forward" in vars(part) for part in teacher.modules())
        with torch.no_grad():
            teacher.cpu()(torch.zeros(1, 8, dtype=torch.int64))
    assert parts[0] == parts[1]
    assert rings[0] is None
    block = sum(p.nbytes for p in gpt(32, depth=5).blocks[0].parameters())
    copies, on_host, on_device = rings[1]
    assert copies >= 5 * 4 - 1
    rounding = 64 * 20  # each tensor begins at a multiple of 64 bytes
    assert 0 <= on_host - 5 * block < 5 * rounding
    assert 0 <= on_device - 2 * block < 2 * rounding
    with pytest.raises(NothingToDoError, match=r"Linear.*whole; write callback.distillation.streamed=false$"):
        fit(make_trainer, Distillation.from_module(nn.Linear(8, 32), streamed=True), module=classification(L))


def test_copy_at_the_start_begins_with_zero(make_trainer: Make) -> None:
    losses = Losses()
    fit(make_trainer, Distillation("start"), losses, module=gpt(), data=texts())
    assert losses.parts[0][0] == 0.0
    assert losses.parts[-1][0] > 1e-6


def test_second_fit_keeps_the_start_of_the_first_for_the_same_module_alone(
    make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    teachers: list[Any] = []

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            weights = technique._teacher.module.state_dict()  # type: ignore[union-attr]
            teachers.append({name: value.clone() for name, value in weights.items()})

    technique, module, first = Distillation("start"), gpt(), gpt().state_dict()
    fit(make_trainer, technique, Watch(), module=module, data=texts())
    assert not equal(module.state_dict(), first)
    fit(make_trainer, technique, Watch(), module=module, data=texts())
    fit(make_trainer, technique, Watch(), module=gpt(seed=2), data=texts())
    assert equal(teachers[0], first)
    assert equal(teachers[1], first)
    assert equal(teachers[2], gpt(seed=2).state_dict())
    assert caplog.text.count("its first fit") == 1


# --- memory ---


def test_no_tensor_of_the_teacher_is_in_the_optimizer_or_in_checkpoints(make_trainer: Make, tmp_path: Path) -> None:
    student, teacher = gpt(), gpt(24)
    trainer = make_trainer(L, callbacks=[Distillation.from_module(teacher)], enable_checkpointing=True)
    trainer.fit(student, texts())
    of_teacher = {id(p) for p in teacher.parameters()}
    stepped = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert {id(p) for p in stepped} == {id(p) for p in student.parameters()}
    assert of_teacher.isdisjoint(map(id, stepped))
    trainer.save_checkpoint(tmp_path / "student.ckpt")
    saved = torch.load(tmp_path / "student.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == student.state_dict().keys()
    assert not any("Distillation" in name for name in saved["callbacks"])
    assert all(p.grad is None for p in teacher.parameters())


def test_the_teacher_s_bytes_are_said_and_freed(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(technique._teacher.bytes)  # type: ignore[union-attr]

    technique = Distillation("start", dtype="bfloat16")
    student = fit(make_trainer, technique, Watch(), module=gpt(), data=texts())
    assert seen == [2 * sum(p.numel() for p in student.parameters())]
    assert technique._teacher is None


# --- sources ---


@pytest.mark.parametrize("of_run", [True, long(False)])
def test_checkpoint_of_a_larger_model_is_the_teacher(make_trainer: Make, tmp_path: Path, of_run: bool) -> None:
    teacher = gpt(24, seed=2)
    trainer = make_trainer(L)
    trainer.fit(teacher, texts())
    file = tmp_path / "run" / "checkpoints" / "last.ckpt"
    trainer.save_checkpoint(file)
    by_file, by_module = Losses(), Losses()
    technique = Distillation(str(tmp_path / "run") if of_run else str(file))
    fit(make_trainer, technique, by_file, module=gpt(), data=texts())
    fit(make_trainer, Distillation.from_module(teacher), by_module, module=gpt(), data=texts())
    assert by_file.parts == by_module.parts
    assert by_file.parts[0][0] > 1e-3


@pytest.mark.long
def test_checkpoint_without_hyperparameters_is_of_the_student_s_architecture(
    make_trainer: Make, tmp_path: Path
) -> None:
    teacher = classification(L, Classifier())
    trainer = make_trainer(L)
    trainer.fit(teacher, loader(2))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    losses = Losses()
    torch.manual_seed(9)
    fit(make_trainer, Distillation(str(tmp_path / "last.ckpt")), losses, module=classification(L, Classifier()))
    assert losses.parts[0][0] > 1e-3
    with pytest.raises(CheckpointError, match=mentions("net.blocks", "save_hyperparameters", "from_module")):
        fit(make_trainer, Distillation(str(tmp_path / "last.ckpt")), module=classification(L, Classifier(blocks=2)))


# --- trace, resuming ---


@pytest.mark.long
def test_resumed_run_has_the_copy_of_the_first_start(make_trainer: Make, tmp_path: Path) -> None:
    def run(epochs: int, path: str | None = None) -> Any:
        module = gpt(seed=1 if path is None else 7)  # a resumed process may begin with any weights
        trainer = make_trainer(L, callbacks=[Distillation("start", alpha=0.9)], max_epochs=epochs)
        # as many steps are planned in both, for the schedule of the learning rate
        module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=1e-2)  # type: ignore[method-assign]
        trainer.fit(module, texts(), ckpt_path=path, weights_only=path and True)
        return module, trainer

    whole, _ = run(2)
    half, trainer = run(1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    assert "start" not in torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]

    class Saves(L.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "within.ckpt")

    module = gpt()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=1e-2)  # type: ignore[method-assign]
    make_trainer(L, callbacks=[Distillation("start", alpha=0.9), Saves()]).fit(module, texts())
    resumed, _ = run(2, str(tmp_path / "within.ckpt"))
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name
    assert any(not torch.equal(a, b) for a, b in zip(whole.parameters(), half.parameters(), strict=True))


@pytest.mark.parametrize("streamed", [False, True])
def test_weights_of_the_copy_that_are_loaded_after_transform_count(make_trainer: Make, streamed: bool) -> None:
    class Loads(L.Callback):
        """Loads the state where FSDP does."""

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            technique.load_state_dict({"start": gpt(seed=7).state_dict()})

    technique, losses = Distillation("start", streamed=streamed), Losses()
    fit(make_trainer, technique, Loads(), losses, module=gpt(), data=texts(1))
    fit(make_trainer, Distillation.from_module(gpt(seed=7)), losses, module=gpt(), data=texts(1))
    assert losses.parts[0][0] == losses.parts[1][0] > 1e-6


def test_copy_is_in_a_checkpoint_that_is_saved_after_the_fit(make_trainer: Make, tmp_path: Path) -> None:
    first = gpt().state_dict()
    trainer = make_trainer(L, callbacks=[Distillation("start")])
    trainer.fit(gpt(), texts())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    teachers = []

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            teachers.append(resumed._teacher.module.state_dict())  # type: ignore[union-attr]

    resumed = Distillation("start")
    trainer = make_trainer(L, callbacks=[resumed, Watch()], max_epochs=2)
    trainer.fit(gpt(seed=2), texts(), ckpt_path=str(tmp_path / "after.ckpt"), weights_only=True)
    assert all(torch.equal(weight, first[name]) for name, weight in teachers[0].items())


def test_validation_is_the_module_s_own(make_trainer: Make) -> None:
    student = gpt()
    trainer = make_trainer(L, callbacks=[Distillation.from_module(gpt(24))])
    (under,) = trainer.validate(student, texts(), verbose=False)
    (plain,) = make_trainer(L).validate(student, texts(), verbose=False)
    assert under == plain


@pytest.mark.long
def test_compiled_model_is_recorded_too(make_trainer: Make) -> None:
    parts = []
    for compiled in (False, True):
        torch.manual_seed(3)
        net = Classifier()
        losses = Losses()
        module = classification(L, net)
        if compiled:
            module.net = torch.compile(net, backend="eager")
        fit(make_trainer, Distillation.from_module(Classifier()), losses, module=module)
        parts.append(losses.parts)
    assert parts[0] == [pytest.approx(each, rel=1e-5) for each in parts[1]]
    torch._dynamo.reset()


# --- refusals ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"teacher": "a", "temperature": 0}, ("temperature", "above 0")),
        ({"teacher": "a", "temperature": -1.0}, ("temperature", "above 0")),
        ({"teacher": "a", "alpha": 0}, ("alpha", "above 0")),
        ({"teacher": "a", "alpha": 1.5}, ("alpha", "at most 1")),
        ({"teacher": "a", "dtype": "int8"}, ("dtype", "bfloat16")),
        ({"teacher": "a", "labels": "b"}, ("one of the two",)),
        ({"labels": "b", "temperature": 2.0}, ("temperature=1",)),
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises((PresetError, ConflictError), match=mentions(*words)):
        Distillation(**settings)


def test_no_teacher_is_refused_before_torch_is_imported(make_trainer: Make) -> None:
    with pytest.raises(ConflictError, match=mentions("callback.distillation.teacher=", "soft-labels")):
        compose("baseline", ["+callback=distillation"])
    with pytest.raises(PresetError, match=mentions("callback.distillation.teacher=")):
        fit(make_trainer, Distillation())
    for other in ("start", None):
        with pytest.raises(PresetError, match=mentions(f"from_module({other!r})", "Distillation(teacher='start')")):
            Distillation.from_module(other)  # type: ignore[arg-type]


def test_teachers_that_cannot_be_loaded_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    for name in ("adapter", "empty", "nothing"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "empty" / "config.json").write_text("{}")
    (tmp_path / "broken.ckpt").write_bytes(b"no checkpoint")
    torch.save({"state_dict": {}}, tmp_path / "hollow.ckpt")
    for name, words in {
        "missing": ("no such file", "teacher="),
        "adapter": ("adapter_config.json", "export RUN --format hf"),
        "empty": ("safetensors",),
        "nothing": ("last.ckpt",),
        "broken.ckpt": ("broken.ckpt",),
        "hollow.ckpt": ("no weights",),
    }.items():
        with pytest.raises(CheckpointError, match=mentions(*words)):
            fit(make_trainer, Distillation(str(tmp_path / name)), module=gpt(), data=texts())


def test_teachers_that_do_not_suit_are_refused(make_trainer: Make) -> None:
    student = classification(L, Classifier())
    with pytest.raises(ConflictError, match=mentions("student itself", "teacher=start")):
        fit(make_trainer, Distillation.from_module(student), module=student)
    with pytest.raises(ConflictError, match=mentions("shares weights", "teacher=start")):
        fit(make_trainer, Distillation.from_module(student.net), module=student)
    with pytest.raises(ConflictError, match=mentions("7 words", "32", "vocabulary")):
        fit(make_trainer, Distillation.from_module(Stack(outputs=7)), module=student)

    with pytest.raises(ConflictError, match=mentions("Conv2d", "student's net", "3D (unbatched)", "takes them")):
        fit(make_trainer, Distillation.from_module(nn.Conv2d(3, 4, 3)), module=student)

    class Silent(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(hidden=x)

    with pytest.raises(ConflictError, match=mentions("no logits", "part=")):
        fit(make_trainer, Distillation.from_module(Silent()), module=student)


def test_parts_are_chosen_by_name_or_refused(make_trainer: Make) -> None:
    class Two(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 32)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.head(self.body(batch[0])).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ConflictError, match=mentions("body, head", "part=head", "forward()")):
        fit(make_trainer, Distillation("start"), module=Two())
    losses = Losses()
    fit(make_trainer, Distillation("start", part="head"), losses, module=Two())
    assert losses.parts[-1][0] > 0
    with pytest.raises(PresetError, match=mentions("haed", "'head'", "body")):
        fit(make_trainer, Distillation("start", part="haed"), module=Two())

    class Functional(Two):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.linear(batch[0], self.head.weight).square().mean()

    with pytest.raises(NothingToDoError, match=mentions("Functional", "body", "part=")):
        fit(make_trainer, Distillation("start"), module=Functional())


def test_labels_of_a_part_that_the_student_lacks_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    class Outer(Words):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Words()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False}
    write_soft_labels(Outer(), sentences(), Words(16), tmp_path / "labels", part="inner", **options)
    labels = str(tmp_path / "labels")
    with pytest.raises(ConflictError, match=mentions("'inner' of another module", "Words", "part=")):
        fit(make_trainer, Distillation(labels=labels), module=Words(), data=sentences())
    losses, inside = Losses(), Outer()
    fit(make_trainer, Distillation(labels=labels), losses, module=inside, data=sentences())
    assert losses.parts[0][0] > 0


def test_manual_optimization_is_refused(make_trainer: Make) -> None:
    module = regression(L, automatic_optimization=False)
    with pytest.raises(ConflictError, match=mentions("automatic_optimization=True", "divergence")):
        fit(make_trainer, Distillation("start"), module=module)
