"""Distillation of hidden layers: features by names, projections that the optimizer trains and no module has."""

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

from lightning_solo.errors import ConflictError, NothingToDoError, PresetError
from lightning_solo.nn.features import Features, distance, feature_of, layer_of, width_dim
from lightning_solo.presets.compose import compose
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.seams.homes import for_home
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.adapters.technique import Adapters
from lightning_solo.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.distillation.technique import Distillation
from lightning_solo.techniques.exact_resume.technique import ExactResume
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.layer_freezing.technique import LayerFreezing
from lightning_solo.techniques.micro_batching.technique import MicroBatching
from lightning_solo.techniques.regional_compilation.technique import RegionalCompilation
from lightning_solo.techniques.zero3.technique import ZeroStageStrategy
from tests.conftest import long
from tests.messages import mentions
from tests.models import small_batch, small_model
from tests.modules import Classifier, classification
from tests.training import equal, fit

Make = Callable[..., Any]
MIDDLE = {"blocks.0": "blocks.1"}


class Student(ByteGPT):
    """A byte GPT with torch's AdamW and a falling rate."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def student(width: int = 16, seed: int = 1, **options: Any) -> Student:
    torch.manual_seed(seed)
    return Student(**{"width": width, "depth": 2, "heads": 2, "context": 8, **options})


def texts(batches: int = 4) -> Any:
    rows = torch.randint(256, (4 * batches, 9), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    return torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


class Watch(L.Callback):
    """Notes the logged parts and the loss of each batch, and the widths in the optimizer."""

    def __init__(self) -> None:
        self.parts: list[dict[str, float]] = []
        self.matrices: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.parts.append({**logged, "loss": float(outputs["loss"])})
        own = {id(p) for p in pl_module.parameters()}
        groups = trainer.optimizers[0].param_groups
        self.matrices.append([tuple(p.shape) for group in groups for p in group["params"] if id(p) not in own])


def features_by_hand(model: Any, batch: Tensor, block: int) -> Tensor:
    h = model.embedding(batch[:, :-1].long()) + model.positions(torch.arange(8))
    for each in model.blocks[: block + 1]:
        h = each(h)
    return h  # type: ignore[no-any-return]


# --- acted, parity ---


@pytest.mark.any_device
@pytest.mark.parametrize("width", [16, 24])
def test_loss_and_projection_are_those_of_a_loop_by_hand(make_trainer: Make, width: int) -> None:
    module, teacher, watch = student(), student(width, seed=2, depth=3), Watch()
    technique = Distillation.from_module(
        copy.deepcopy(teacher), alpha=0.3, features={"blocks.0": "blocks.2"}, feature_weight=0.5
    )
    fit(make_trainer, technique, watch, module=module, data=texts())
    reference = student()
    bound = 16**-0.5
    matrix = torch.empty(width, 16).uniform_(-bound, bound, generator=torch.Generator().manual_seed(0))
    projection = nn.Parameter(matrix.clone() if width != 16 else torch.eye(16))
    trained = [*reference.parameters(), *([projection] if width != 16 else [])]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    for step, batch in enumerate(texts()):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2  # Lightning steps the schedule once per epoch
        logits, wanted = reference(batch[:, :-1]), teacher(batch[:, :-1]).detach()
        own = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().long())
        kl = F.kl_div(
            *(x.flatten(0, 1).log_softmax(-1) for x in (logits, wanted)), log_target=True, reduction="batchmean"
        )
        ours, theirs = features_by_hand(reference, batch, 0), features_by_hand(teacher, batch, 2).detach()
        mse = F.mse_loss(ours @ projection.t(), theirs)
        loss = 0.7 * own + 0.3 * kl + 0.5 * mse
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen = watch.parts[step]
        assert seen["distillation/features/blocks.0"] == pytest.approx(float(mse.detach()), rel=1e-4)
        assert seen["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert watch.matrices == [[(24, 16)] if width == 24 else []] * 4
    assert watch.parts[0]["distillation/features/blocks.0"] > 1e-4
    for name, p in reference.named_parameters():
        assert (p - module.get_parameter(name)).norm() < 1e-3 * p.norm(), name  # AdamW enlarges rounding of small ones
    if width == 24:
        (found,) = technique._projections.weights.values()
        assert (projection - found).norm() < 1e-3 * projection.norm()
        assert not torch.allclose(matrix, found, atol=1e-3)


def test_equal_features_give_zero_and_no_gradient() -> None:
    features = torch.randn(3, 7, 8).requires_grad_()
    for loss in ("mse", "normalized"):
        features.grad = None
        value = distance(features, features.detach().clone(), loss)
        value.backward()  # type: ignore[no-untyped-call]
        assert float(value.detach()) == 0.0
        assert torch.equal(features.grad, torch.zeros_like(features))  # type: ignore[arg-type]


def test_distance_is_of_counted_positions_and_of_either_width_dimension() -> None:
    torch.manual_seed(3)
    ours, theirs = torch.randn(2, 5, 6), torch.randn(2, 5, 4)
    matrix, counted = torch.randn(4, 6), torch.rand(2, 5) < 0.5
    expected = F.mse_loss((ours @ matrix.t())[counted], theirs[counted])
    torch.testing.assert_close(distance(ours, theirs, "mse", counted, matrix), expected)
    pictures, others = ours.unflatten(1, (5, 1)).permute(0, 3, 1, 2), theirs.unflatten(1, (5, 1)).permute(0, 3, 1, 2)
    assert width_dim("a", pictures, others) == 1
    torch.testing.assert_close(
        distance(pictures, others, "mse", None, matrix, 1), F.mse_loss(ours @ matrix.t(), theirs)
    )
    cosine = 2 - 2 * F.cosine_similarity(ours @ matrix.t(), theirs, -1).mean()
    torch.testing.assert_close(distance(ours, theirs, "normalized", None, matrix), cosine)
    assert float(distance(ours, 0 * ours, "normalized")) == pytest.approx(1.0)
    assert float(distance(ours, theirs, "mse", torch.zeros(2, 5, dtype=torch.bool), matrix)) == 0.0


@pytest.mark.parametrize(
    "other",
    [
        lambda: ActivationCheckpointing(),
        lambda: MicroBatching(micro_batch=2),
        long(lambda: ChunkedCrossEntropy(chunk_tokens=7)),
        long(lambda: {"streamed": True}),
        long(lambda: {"accumulate_grad_batches": 2}),
    ],
    ids=["activation_checkpointing", "micro_batching", "chunked_cross_entropy", "streamed", "accumulation"],
)
def test_other_techniques_change_no_more_than_rounding(make_trainer: Make, other: Any) -> None:
    ends = []
    for with_other in (False, True):
        given = other() if with_other or "accumulate_grad_batches" in str(other.__code__.co_consts) else None
        settings = given if isinstance(given, dict) else {}
        trainer = {name: settings.pop(name) for name in [*settings] if name == "accumulate_grad_batches"}
        watch, module = Watch(), student()
        technique = Distillation.from_module(student(24, seed=2, depth=3), features=MIDDLE, **settings)
        callback = None if isinstance(given, dict) else given
        fit(make_trainer, technique, callback, watch, module=module, data=texts(), **trainer)
        ends.append((module, watch.parts, technique._projections.weights["blocks.0"].detach()))
    (one, parts, matrix), (two, others, other_matrix) = ends
    assert [each["distillation/features/blocks.0"] for each in parts] == pytest.approx(
        [each["distillation/features/blocks.0"] for each in others], rel=1e-4
    )
    assert torch.allclose(matrix, other_matrix, atol=2e-4)
    for name, p in one.named_parameters():
        assert torch.allclose(p, two.get_parameter(name), atol=2e-4), name


def test_features_bring_a_student_s_layer_near_the_teacher_s(make_trainer: Make) -> None:
    far = []
    for features in (None, MIDDLE):
        module, teacher = student(), student(seed=2)
        settings = (
            {} if features is None else {"features": features, "feature_weight": 10.0, "feature_loss": "normalized"}
        )
        fit(make_trainer, Distillation.from_module(copy.deepcopy(teacher), **settings), module=module, data=texts(20))
        batch = next(iter(texts()))
        with torch.no_grad():
            ours, theirs = features_by_hand(module, batch, 0), features_by_hand(teacher, batch, 1)
        far.append(float(distance(ours, theirs, "normalized")))
    assert far[1] < 0.7 * far[0]


# --- sources and parts ---


@pytest.mark.long
def test_layers_of_transformers_and_of_convolutions(make_trainer: Make) -> None:
    class Causal(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.model = small_model("Llama")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(**batch).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    batch, teacher, watch = small_batch(2), small_model("Llama"), Watch()
    technique = Distillation.from_module(teacher, features={"model.model.layers.0": "model.layers.1"})
    data = torch.utils.data.DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    module = Causal()
    with torch.no_grad():
        ours, theirs = (
            model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states
            for model in (module.model, teacher.eval())
        )
    fit(make_trainer, technique, watch, module=module, data=data)
    counted = F.pad(batch["labels"][:, 1:] != -100, (0, 1))
    expected = F.mse_loss(ours[1][counted], theirs[2][counted])
    assert watch.parts[0]["distillation/features/model.model.layers.0"] == pytest.approx(float(expected), rel=1e-4)

    class Pictures(L.LightningModule):
        def __init__(self, channels: int) -> None:
            super().__init__()
            torch.manual_seed(channels)
            self.first = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
            self.head = nn.Linear(channels, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.first(x).mean((2, 3)))  # type: ignore[no-any-return]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows = torch.utils.data.TensorDataset(torch.randn(8, 1, 6, 6), torch.randint(10, (8,)))
    watch = Watch()
    technique = Distillation.from_module(Pictures(6), features={"first": "first"})
    fit(make_trainer, technique, watch, module=Pictures(4), data=torch.utils.data.DataLoader(rows, 4))
    assert watch.matrices == [[(6, 4)]] * 2


@pytest.mark.long
def test_adapters_learn_from_features(make_trainer: Make) -> None:
    watch = Watch()
    technique = Distillation("start", features={"blocks.1": "blocks.1"}, alpha=0.5)
    fit(make_trainer, technique, Adapters(), watch, module=student(), data=texts())
    values = [each["distillation/features/blocks.1"] for each in watch.parts]
    assert values[0] == 0.0
    assert values[-1] > 0


# --- checkpoints ---


@pytest.mark.any_device
@pytest.mark.parametrize("accumulate", [1, long(2)])
def test_resumed_run_has_the_projection_to_the_bit_and_the_file_s_states_are_without(
    make_trainer: Make, tmp_path: Path, accumulate: int
) -> None:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    def run(*more: Any, path: Path | None = None) -> Any:
        module = student(seed=1 if path is None else 9)
        technique = Distillation.from_module(student(24, seed=2, depth=3), features=MIDDLE)
        callbacks = [technique, ExactResume(), *more]
        trainer = make_trainer(L, callbacks=callbacks, max_epochs=2, accumulate_grad_batches=accumulate)
        trainer.fit(module, texts(8), ckpt_path=path, weights_only=path and True)
        return module, technique._projections

    whole, projections = run(Save())
    saved = torch.load(tmp_path / "middle.ckpt", weights_only=True)
    own = {name for name, _ in student().named_parameters()}
    states = saved["optimizer_states"][0]
    assert len(states["state"]) == len(states["param_groups"][0]["params"]) == len(own)
    assert not any("proj" in name for name in saved["state_dict"])
    assert saved["callbacks"]["Distillation"]["projections"]["weights"]["blocks.0"].shape == (24, 16)
    resumed, others = run(path=tmp_path / "middle.ckpt")
    assert equal(whole.state_dict(), resumed.state_dict())
    assert torch.equal(projections.weights["blocks.0"], others.weights["blocks.0"])
    assert equal(projections.state_dict(), others.state_dict())


@pytest.mark.any_device
def test_no_trace_is_left_and_a_run_without_features_resumes(make_trainer: Make, tmp_path: Path) -> None:
    module, teacher = student(), student(24, seed=2)
    trainer = make_trainer(L, callbacks=[Distillation.from_module(teacher, features=MIDDLE)])
    trainer.fit(module, texts())
    trained = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert [*map(id, trained)] == [*map(id, module.parameters())]
    assert trainer.optimizers[0].state.keys() == {*module.parameters()}
    for model in (module, teacher):
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert saved["callbacks"]["Distillation"]["projections"]["states"]["blocks.0"]["exp_avg"].shape == (24, 16)
    plain = make_trainer(L, max_epochs=2)
    with pytest.warns(UserWarning, match="Distillation"):
        plain.fit(student(seed=3), texts(), ckpt_path=tmp_path / "after.ckpt", weights_only=True)
    assert plain.global_step == 8


# --- refusals ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"features": {}}, ("features", "blocks.1")),
        ({"features": {"a": ""}}, ("features", "blocks.1")),
        ({"features": {"a": "b"}, "feature_weight": 0}, ("feature_weight", "above 0")),
        ({"features": {"a": "b"}, "feature_loss": "l1"}, ("feature_loss", "normalized")),
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(PresetError, match=mentions(*words)):
        Distillation("start", **settings)


def test_names_are_composed_and_refused_with_labels() -> None:
    overrides = ["+callback=distillation", "callback.distillation.teacher=start"]
    preset = compose("baseline", [*overrides, "callback.distillation.features={blocks.0:blocks.1}"])
    (chosen,) = (each for each in preset.techniques if each.card.name == "distillation")
    assert dict(chosen.settings.features) == MIDDLE
    with pytest.raises(ConflictError, match=mentions("features", "labels", "teacher=")):
        Distillation(labels="file", features=MIDDLE)


def test_layers_that_do_not_suit_are_refused(make_trainer: Make) -> None:
    class Shared(ByteGPT):
        def forward(self, x: Tensor) -> Tensor:
            self.blocks[0](self.embedding(x.long()))
            return super().forward(x)

    torch.manual_seed(0)
    twice = Shared(width=16, depth=2, heads=2, context=8)
    for module, features, error, words in (
        (student(), {"block.0": "blocks.1"}, PresetError, ("student", "block.0", "'blocks.0'")),
        (student(), {"blocks.0": "blocks.7"}, PresetError, ("teacher", "blocks.7", "did you mean")),
        (student(), {"blocks": "blocks.1"}, NothingToDoError, ("blocks of the student", "isn't called")),
        (twice, MIDDLE, ConflictError, ("blocks.0 of the student", "2 times")),
    ):
        with pytest.raises(error, match=mentions(*words)):
            fit(
                make_trainer, Distillation.from_module(student(24, seed=2), features=features), module=module,
                data=texts(),
            )  # fmt: skip
        assert not any(part._forward_hooks for part in module.modules())


def test_other_lengths_are_refused_with_their_shapes() -> None:
    for ours, theirs in (((2, 7, 8), (2, 9, 8)), ((2, 7, 8), (2, 8)), ((2, 3, 4, 4), (2, 5, 8, 4))):
        with pytest.raises(ConflictError, match=mentions(str(ours), str(theirs), "same positions")):
            width_dim("blocks.0", torch.zeros(ours), torch.zeros(theirs))


def test_outputs_that_are_overwritten_or_no_tensors_are_refused() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"hidden": x}

    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), Odd())
    features = Features(net, ["0", "1", "2"], "student")
    with features.recording():
        net(torch.randn(2, 4))
        found = features.since(0)
    with pytest.raises(ConflictError, match=mentions("0 of the student", "in place", "inplace=False")):
        feature_of(found, "0", "student")
    assert (feature_of(found, "1", "student") >= 0).all()
    with pytest.raises(ConflictError, match=mentions("2 of the student", "dict")):
        feature_of(found, "2", "student")
    features.remove()
    assert features.kept == []


def test_what_cannot_train_a_projection_is_refused_and_equal_widths_are_not(make_trainer: Make) -> None:
    for other, remedy in (
        (GradientRelease(), "~callback.gradient_release"),
        (CompactStates(master_bits=32), "AdamW"),
    ):
        technique = Distillation.from_module(student(24, seed=2), features=MIDDLE)
        with pytest.raises(ConflictError, match=mentions("width 16", "24", "one width", remedy)):
            fit(make_trainer, technique, other, module=student(), data=texts())
    technique, engine = Distillation.from_module(student(24, seed=2), features=MIDDLE), for_home(ZeroStageStrategy)()
    with pytest.raises(ConflictError, match=mentions("ZeroStageStrategy", "~strategy")):
        fit(make_trainer, technique, module=student(), data=texts(), strategy=engine)
    watch = Watch()
    technique = Distillation.from_module(student(16, seed=2), features=MIDDLE)
    fit(make_trainer, technique, GradientRelease(), watch, module=student(), data=texts())
    assert watch.parts[-1]["distillation/features/blocks.0"] > 0


def test_frozen_and_compiled_layers_are_refused(make_trainer: Make) -> None:
    technique = Distillation("start", features={"blocks.0": "blocks.0"})
    with pytest.raises(ConflictError, match=mentions("blocks.0", "no gradient", "a layer after")):
        fit(make_trainer, technique, LayerFreezing(trained_blocks=1), module=student(), data=texts())
    technique = Distillation("start", features={"net.blocks.0": "net.blocks.0"})
    compiling = RegionalCompilation(backend="aot_eager")
    with pytest.raises(ConflictError, match=mentions("net.blocks.0", "~callback.regional_compilation")):
        fit(make_trainer, technique, compiling, module=classification(L, Classifier()))
    compiled = nn.Sequential(torch.compile(Classifier(), backend="eager"))  # type: ignore[arg-type]
    with pytest.raises(ConflictError, match=mentions("0._orig_mod.blocks", "compiled")):
        layer_of(compiled, "0._orig_mod.blocks", "student")
    assert layer_of(compiled, "0", "student") is compiled[0]
