"""An interrupt that nothing can swallow."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import lightning


class EndOnInterrupt(lightning.Callback):
    """Raises ``KeyboardInterrupt`` once more after the batch in which it came.

    Python drops an exception that is raised while an object is finalised; a run would then go on as if nothing had
    happened, and whoever started it, a person or a batch system, would wait in vain.
    """

    def __init__(self) -> None:
        self.asked = False

    def setup(self, trainer: lightning.Trainer, module: lightning.LightningModule, stage: str) -> None:
        self.asked = False
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupted)

    def teardown(self, trainer: lightning.Trainer, module: lightning.LightningModule, stage: str) -> None:
        if signal.getsignal(signal.SIGINT) == self._interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        raise KeyboardInterrupt

    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt

    def on_validation_batch_end(self, *arguments: Any) -> None:
        self.on_train_batch_end()

    def on_test_batch_end(self, *arguments: Any) -> None:
        self.on_train_batch_end()
