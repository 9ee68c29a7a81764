"""Generated data in the form that each library's modules take, and modules for models that aren't LightningModules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

ROWS = 32
BATCH = 8


def draws(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers, the same at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, low: int = 0, seed: int = 0) -> Tensor:
    """Return random integers from ``low`` to ``high - 1``, the same at each call."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def loader_of(columns: Mapping[str, Tensor], batch_size: int = BATCH) -> DataLoader[Any]:
    """Return a loader of mappings, one row of each column per item."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return DataLoader(rows, batch_size=batch_size)  # type: ignore[arg-type]


class Model(L.LightningModule):
    """Trains a model of transformers or diffusers: its own loss, or the mean squared error of its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**{name: value for name, value in batch.items() if name != "target"})
        return nn.functional.mse_loss(output.sample, batch["target"]) if "target" in batch else output.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class GraphModel(Model):
    """Trains a model of torch_geometric to predict a number for each graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        nodes = self.model(batch.x, batch.edge_index)
        return nn.functional.mse_loss(global_mean_pool(nodes, batch.batch)[:, 0], batch.y)


def graphs() -> Any:
    """Return a loader of torch_geometric's batches of graphs with 5 to 8 nodes."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader

    items = []
    for row in range(ROWS):
        nodes = 5 + row % 4
        x = draws(nodes, 8, seed=row)
        items.append(Data(x=x, edge_index=integers(nodes, 2, 3 * nodes, seed=row), y=x.mean().reshape(1)))
    return GraphLoader(items, batch_size=BATCH)


def images(labels: int = 3) -> DataLoader[Any]:
    """Return a loader of images of 32 x 32 pixels and their labels."""
    return loader_of({"pixel_values": draws(ROWS, 3, 32, 32), "labels": integers(labels, ROWS)})


def noisy_images() -> DataLoader[Any]:
    """Return a loader of noisy images, the time steps of the noise, and the noise."""
    noise = draws(ROWS, 3, 16, 16)
    return loader_of({"sample": noise + 1, "timestep": integers(1000, ROWS), "target": noise})


def speech() -> DataLoader[Any]:
    """Return a loader of sound of 4,000 samples and transcripts of 3 tokens."""
    return loader_of({"input_values": draws(ROWS, 4000), "labels": integers(20, ROWS, 3, low=2)})


def spectrograms(bins: int = 80, frames: int = 60) -> DataLoader[Any]:
    """Return a loader of log-mel spectrograms and transcripts of 6 tokens."""
    return loader_of({"input_features": draws(ROWS, bins, frames), "labels": integers(90, ROWS, 6, low=2)})


def tokens() -> DataLoader[Any]:
    """Return a loader of texts of 16 tokens, which are their own labels."""
    ids = integers(90, ROWS, 16, low=2)
    return loader_of({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})


def series_frame() -> Any:
    """Return 8 series of 48 hours as a data frame, in neuralforecast's columns."""
    import pandas as pd

    times = pd.date_range("2024-01-01", periods=48, freq="h")
    frames = [
        pd.DataFrame({"unique_id": f"s{row}", "ds": times, "y": draws(48, seed=row).numpy(), "step": range(48)})
        for row in range(8)
    ]
    return pd.concat(frames, ignore_index=True)


def series(batch_size: int = 4) -> Any:
    """Return neuralforecast's data module."""
    from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset

    dataset, *_ = TimeSeriesDataset.from_df(series_frame()[["unique_id", "ds", "y"]])
    return TimeSeriesDataModule(dataset, batch_size=batch_size)


def series_dataset(covariates: bool = True) -> Any:
    """Return pytorch-forecasting's data set of the series; N-BEATS takes no covariates."""
    from pytorch_forecasting import TimeSeriesDataSet
    from pytorch_forecasting.data import NaNLabelEncoder

    more: dict[str, Any] = {"time_varying_known_reals": ["step"], "static_categoricals": ["unique_id"]}
    return TimeSeriesDataSet(
        series_frame(),
        time_idx="step",
        target="y",
        group_ids=["unique_id"],
        max_encoder_length=16,
        min_encoder_length=16,
        max_prediction_length=4,
        min_prediction_length=4,
        time_varying_unknown_reals=["y"],
        categorical_encoders={"unique_id": NaNLabelEncoder().fit(series_frame().unique_id)},
        **(more if covariates else {}),
    )


def series_loader(covariates: bool = True) -> Any:
    """Return a loader of `series_dataset`."""
    return series_dataset(covariates).to_dataloader(train=True, batch_size=BATCH)


def windows(
    context_length: int = 16, prediction_length: int = 4, series: int | None = None, time_last: bool = False
) -> DataLoader[Any]:
    """Return a loader of windows with the inputs of gluonts' modules.

    With ``series`` windows have as many series each; ``time_last`` puts a time feature's dimension before the time.
    """
    last = () if series is None else (series,)
    one = (1, -1) if time_last else (-1, 1)
    columns = {
        "feat_static_cat": integers(1, ROWS, 1),
        "feat_static_real": draws(ROWS, 1),
        "past_time_feat": draws(ROWS, context_length).unflatten(1, one),
        "past_target": draws(ROWS, context_length, *last).abs(),
        "past_observed_values": torch.ones(ROWS, context_length, *last),
        "future_time_feat": draws(ROWS, prediction_length).unflatten(1, one),
        "future_target": draws(ROWS, prediction_length, *last).abs(),
        "future_observed_values": torch.ones(ROWS, prediction_length, *last),
        "scale": torch.ones(ROWS, 1),
        "feat_dynamic_real": draws(ROWS, context_length + prediction_length, 1),
    }
    return loader_of(columns)


def items_schema(cardinality: int = 40, width: int = 32) -> Any:
    """Return RePlay's description of sequences of items."""
    from replay.data import FeatureHint, FeatureType
    from replay.data.nn import TensorFeatureInfo, TensorSchema

    item = TensorFeatureInfo(
        "item_id",
        FeatureType.CATEGORICAL,
        is_seq=True,
        feature_hint=FeatureHint.ITEM_ID,
        cardinality=cardinality,
        padding_value=cardinality,
        embedding_dim=width,
    )
    return TensorSchema(item)


def interactions(form: str, length: int = 12, cardinality: int = 40) -> DataLoader[Any]:
    """Return a loader of sequences of items, with the names of ``sasrec``, ``bert4rec`` or RePlay's ``new`` modules."""
    items = integers(cardinality, ROWS, length + 1)
    present = torch.ones(ROWS, length, dtype=torch.bool)
    present[::2, :3] = False  # padding
    inputs, labels = items[:, :-1], items[:, 1:]
    features, columns = {
        "sasrec": ("feature_tensor", {"padding_mask": present, "target_padding_mask": present}),
        "bert4rec": ("inputs", {"pad_mask": present, "token_mask": integers(3, ROWS, length) > 0}),
        "new": ("feature_tensors", {"padding_mask": present, "target_padding_mask": present[..., None]}),
    }[form]
    columns["positive_labels"] = labels[..., None] if form == "new" else labels
    rows = [
        {features: {"item_id": inputs[row]}, **{name: column[row] for name, column in columns.items()}}
        for row in range(ROWS)
    ]
    return DataLoader(rows, batch_size=BATCH)  # type: ignore[arg-type]


def table() -> DataLoader[Any]:
    """Return a loader of rows of 6 numbers and 2 categories for pytorch_tabular."""
    numbers = draws(ROWS, 6)
    categories = integers(5, ROWS, 2, low=1)
    return loader_of({"continuous": numbers, "categorical": categories, "target": numbers.mean(1, keepdim=True)})


def table_config(model: Any) -> Any:
    """Return the whole configuration of a pytorch_tabular model, as its `TabularModel` makes it."""
    from omegaconf import OmegaConf
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig

    data = DataConfig(target=["y"], continuous_cols=[f"n{i}" for i in range(6)], categorical_cols=["a", "b"])
    parts = (data, model, TrainerConfig(), OptimizerConfig())
    return OmegaConf.merge(*(OmegaConf.to_container(OmegaConf.structured(part)) for part in parts))


def table_columns() -> Any:
    """Return what pytorch_tabular infers from the data."""
    from omegaconf import OmegaConf
    from pytorch_tabular.config import InferredConfig

    sizes: dict[str, Any] = {"categorical_cardinality": [5, 5], "embedding_dims": [(5, 3), (5, 3)]}
    return OmegaConf.structured(InferredConfig(categorical_dim=2, continuous_dim=6, output_dim=1, **sizes))
