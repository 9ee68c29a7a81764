"""The card of `adapters`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_solo.cards.card import Card, Requirement
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import ROUNDING, answers
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, names_or, setting
from lightning_solo.errors import PresetError

METHODS = ("lora", "rslora", "dora", "pissa", "ia3")


def _wrong_name(name: str) -> str | None:
    fits = name.isidentifier() and name not in ("weight", "bias")
    return None if fits else "expected a word of letters, digits and underscores"


def _wrong_rows(rows: Sequence[int] | Mapping[str, Sequence[int]] | None) -> str | None:
    lists = list(rows.values()) if isinstance(rows, Mapping) else [rows or ()]
    if any(len(set(each)) != len(each) for each in lists):
        return "a row is listed twice"
    return None


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of Adapters."""

    method: str = setting(
        "lora",
        "lora: two factors of rank r; rslora: scaled for large ranks; dora: directions and magnitudes; pissa: starts"
        " from the largest singular values; ia3: one scale per output",
        allowed=METHODS,
    )
    r: int = setting(16, "rank of the factors", at_least=1)
    alpha: float = setting(
        32.0,
        "scale: the factors' product is multiplied by alpha / r, under rslora by alpha / sqrt(r)",
        check=lambda alpha: None if alpha > 0 else "expected a number above 0",
    )
    dropout: float = setting(
        0.0,
        "probability with which an input of the factors is dropped",
        check=lambda p: None if 0 <= p < 1 else "expected a probability below 1",
    )
    targets: str | Sequence[str] = setting(
        "all-linear",
        "all-linear: all linear layers but output heads, frozen and tied ones; or classes and patterns of names, as"
        " [q_proj, v_proj], of which each must match",
        check=names_or("all-linear", "classes and names of layers", "[q_proj, v_proj]"),
    )
    modules_to_save: Sequence[str] = setting((), "names of modules that are trained whole, as [lm_head]")
    trainable_token_indices: Sequence[int] | Mapping[str, Sequence[int]] | None = setting(
        None,  # not (), into which Hydra can't merge a mapping
        "rows of the embedding that are trained, as [32000, 32001]; or embedding or head -> rows; null: new tokens",
        check=_wrong_rows,
    )
    adapter_name: str = setting("default", "the adapter's name; others in the module are frozen", check=_wrong_name)
    after_fit: str = setting(
        "keep", "keep: the module keeps its adapters; merge: they are added to its weights", allowed=("keep", "merge")
    )

    def _check_together(self) -> None:
        if self.method == "ia3" and self.trainable_token_indices:
            raise PresetError(
                f"{self.technique}.method=ia3 and trainable_token_indices: IA3 has no rows of tokens; write method=lora"
            )


def _under_fsdp(settings: Settings, configuration: Configuration) -> str:
    """Return why adapters can't be merged after the fit. Their training is that of one device."""
    if settings.after_fit == "merge":
        return "adapters can't be merged into shards; write callback.adapters.after_fit=keep"
    return ROUNDING


CARD = Card(
    name="adapters",
    target="lightning_solo.techniques.adapters.technique:Adapters",
    phase=Phase.ADAPT,
    settings=Settings,
    saves="of each frozen weight its gradient and optimizer states: with AdamW in fp32 12 of 16 bytes; checkpoints hold"
    " the adapters alone",
    costs="each adapted layer computes a second, small product, and keeps its activations",
    numerics="trains another, smaller set of parameters than a plain run: for fine-tuning. Equal to peft's own training"
    " to the bit in fp32",
    conflicts="another technique that chooses which parameters are trained",
    reference="Hu et al. 2021, LoRA, https://arxiv.org/abs/2106.09685; Kalajdzievski 2023, rsLoRA,"
    " https://arxiv.org/abs/2312.03732; Liu et al. 2024, DoRA, https://arxiv.org/abs/2402.09353; Meng et al. 2024,"
    " PiSSA, https://arxiv.org/abs/2404.02948; Liu et al. 2022, IA3, https://arxiv.org/abs/2205.05638",
    owns=frozenset({"trained_parameters"}),
    requires=(
        Requirement(
            "package",
            'callback.adapters needs peft: write pip install "lightning-solo[adapters]", or ~callback.adapters',
            "peft>=0.21,<0.22",
        ),
    ),
    on_cpu={"after_fit": "merge"},  # the tests over all cards compare the module's own weights
    engines=answers(ddp=ROUNDING, fsdp=_under_fsdp, zero3=ROUNDING),
)
