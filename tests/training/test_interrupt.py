"""An interrupt ends a training also where Python drops the first exception."""

import signal
import weakref

import lightning
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from sfno_dist.training.interrupt import EndOnInterrupt


class Dropped(lightning.Callback):
    """Interrupts while an object is finalised, at the second batch."""

    def on_train_batch_start(self, trainer, module, batch, index):
        if index == 1:
            thing = torch.zeros(1)
            weakref.finalize(thing, signal.raise_signal, signal.SIGINT)
            del thing


@pytest.mark.filterwarnings("ignore")
def test_an_interrupt_that_python_drops_ends_the_run():
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[Dropped(), EndOnInterrupt()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit):
            trainer.fit(BoringModel())
    finally:
        signal.signal(signal.SIGINT, before)
    assert trainer.interrupted and trainer.global_step == 2
