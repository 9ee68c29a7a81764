"""Train on several devices with all of the module on each, by Lightning's DDPStrategy."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING

from lightning_solo.cards.settings import TechniqueSettings
from lightning_solo.errors import listed
from lightning_solo.seams.engines import SeveralDevices
from lightning_solo.techniques.ddp.card import Settings

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Base(SeveralDevices, DDPStrategy): ...

else:
    Base = SeveralDevices


class DataParallelStrategy(Base, Settings):
    """Train on several devices with DistributedDataParallel.

    Attributes:
        settings: the arguments.
    """

    base = "DDPStrategy"
    __setattr__ = object.__setattr__  # Lightning's strategy sets attributes
    __delattr__ = object.__delattr__

    def _init_state(self) -> None:
        self.settings = Settings.from_settings(self)
        self._reduced: list[str] = []  # names of the parameters that were trained when the module was wrapped
        super(TechniqueSettings, self).__init__(  # type: ignore[call-arg]
            timeout=timedelta(seconds=self.timeout_s),
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )

    def __repr__(self) -> str:
        return repr(self.settings).replace("Settings", type(self).__name__, 1)

    def setup_distributed(self) -> None:
        """Open the process group."""
        if self.is_alone:
            self.set_world_ranks()
            self.open_alone(self._get_process_group_backend())
        else:
            super().setup_distributed()

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        self._reduced = [name for name, p in model.named_parameters() if p.requires_grad]
        return super()._setup_model(model)

    def on_exception(self, exception: BaseException) -> None:
        """Name the parameters without a gradient, and say how they can be allowed."""
        if "Expected to have finished reduction in the prior iteration" in str(exception):
            indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(exception))
            names = listed(self._reduced[int(index)] for index in indices[1].split()) if indices else "a parameter"
            exception.args = (
                f"{exception}\n{names}: trained, and got no gradient; write strategy.find_unused_parameters=true",
            )
