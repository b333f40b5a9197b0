"""What goes along with a training, in Lightning's own loop: averaged weights, the watchdog, early stops."""

from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
import xarray as xr
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from small_archive import archive, everything

from sfno_dist import ProcessMesh
from sfno_dist.data import DataError
from sfno_dist.training import checkpoint as checkpoints
from sfno_dist.training.callbacks import ForecastMaps, Throughput, TrainingDivergedError, Watchdog, WeightAverage
from sfno_dist.training.callbacks import maps as maps_module
from sfno_dist.training.callbacks import throughput as throughput_module
from sfno_dist.training.checkpoint import build_model
from sfno_dist.training.module import ForecastModule, warmup_cosine

SETTINGS = {"name": "SphericalTransformer", "embed_channels": 8, "depth": 1, "num_heads": 2}
SETTINGS["latent_grid"] = {"kind": "legendre-gauss", "nlat": 6, "nlon": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    archive(folder)
    return folder


def data(folder, **changes):
    return everything(folder, str(folder / "a.nc"), **{"rollout_steps": 2, "batch_size": 8, **changes})


def fit(archive_data, folder, *, resume=None, callbacks=(), **options):
    archive_data.setup()
    torch.manual_seed(0)
    module = ForecastModule(
        build_model(SETTINGS, archive_data.recipe), archive_data.recipe, model_settings=SETTINGS,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    )  # fmt: skip
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=list(callbacks), **{"max_epochs": 2, "num_sanity_val_steps": 1, **options},
    )  # fmt: skip
    trainer.fit(module, datamodule=archive_data, ckpt_path=resume)
    return module, trainer


class Weights(lightning.Callback):
    """Notes the weights after each step, and those that are validated."""

    def __init__(self):
        self.steps, self.validated = [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.steps.append(weights(module))

    def on_validation_batch_start(self, trainer, module, *_):
        self.validated.append(weights(module))


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.model.parameters()])


def test_averaged_weights_are_scored_kept_and_tested(folder, tmp_path):
    noted, average = Weights(), WeightAverage(decay=0.3)
    best = ModelCheckpoint(tmp_path, monitor="validation/loss", filename="best")
    module, trainer = fit(data(folder), tmp_path, callbacks=[average, noted, best])
    expected = noted.steps[0]
    assert len(noted.steps) == 6
    # min(0.3, (1 + n) / (10 + n)): the first weights soon count for little
    for decay, after in zip([2 / 11, 3 / 12, 0.3, 0.3, 0.3], noted.steps[1:], strict=True):
        expected = decay * expected + (1 - decay) * after
    torch.testing.assert_close(noted.validated[-1], expected)
    torch.testing.assert_close(weights(module), expected)  # after the training
    loss = float(trainer.callback_metrics["validation/loss"])
    assert loss == pytest.approx(float(best.best_model_score))
    torch.testing.assert_close(
        torch.cat([p.flatten() for p in checkpoints.load(best.best_model_path).model.parameters()]), expected
    )
    trainer.test(module, datamodule=data(folder), ckpt_path="best", verbose=False)
    torch.testing.assert_close(weights(module), expected)


@pytest.mark.parametrize("steps", [2, 3, 5])  # an epoch has 3
def test_an_average_goes_on_as_if_it_had_not_stopped(folder, tmp_path, steps):
    kept = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole, _ = fit(data(folder), tmp_path, callbacks=[WeightAverage(0.6), kept])
    noted = Weights()
    again, _ = fit(
        data(folder), tmp_path, callbacks=[WeightAverage(0.6), noted], resume=tmp_path / f"step={steps}.ckpt"
    )
    assert len(noted.steps) == 6 - steps and torch.equal(weights(whole), weights(again))


@pytest.mark.parametrize("steps", [2, 3, 7])  # epochs of 6, 5 and 5 steps
def test_the_learning_rate_goes_on_through_the_stages_of_a_curriculum(folder, tmp_path, steps):
    stages = {"rollout_steps": {"train": [[0, 1], [1, 4]]}, "batch_size": 4, "num_workers": 0}
    kept, rates = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1), Rates()
    whole, _ = fit(data(folder, **stages), tmp_path, callbacks=[kept, rates], max_epochs=3)
    expected = warmup_cosine(16, 1)
    assert rates.seen == pytest.approx([1e-2 * expected(step) for step in range(16)])
    again, _ = fit(data(folder, **stages), tmp_path, resume=tmp_path / f"step={steps}.ckpt", max_epochs=3)
    assert torch.equal(weights(whole), weights(again))


class Rates(lightning.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, *_):
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_an_error_within_a_validation_does_not_exchange_what_is_kept(folder, tmp_path):
    class Fails(lightning.Callback):
        def on_validation_batch_end(self, trainer, module, *_):
            if not trainer.sanity_checking:
                raise DataError("bad")

    noted, average = Weights(), WeightAverage(decay=0.6)
    with pytest.raises(DataError):
        fit(data(folder), tmp_path, callbacks=[average, noted, Fails(), Keeps(tmp_path / "kept.ckpt")])
    stored = torch.load(tmp_path / "kept.ckpt", weights_only=True)
    names = [name for name in stored["state_dict"] if name.startswith("model.")]
    assert torch.equal(torch.cat([stored["current_model_state"][name].flatten() for name in names]), noted.steps[-1])
    assert not torch.equal(torch.cat([stored["state_dict"][name].flatten() for name in names]), noted.steps[-1])


class Keeps(lightning.Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, module, error):
        trainer.save_checkpoint(self.path)


class Spoils(lightning.Callback):
    """Puts ``value`` into one cell of the second target, or into the gradient, at one step."""

    def __init__(self, step, value, *, gradient=False):
        self.step, self.value, self.gradient = step, value, gradient

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step and not self.gradient:
            batch["state"][1, 2, 1, 3, 4] = self.value
            self.times = batch["times"][1].numpy().astype("datetime64[ns]").astype("datetime64[m]").astype(str)

    def on_after_backward(self, trainer, module):
        if trainer.global_step == self.step and self.gradient:
            module.model.head.bias.grad[0] = self.value


@pytest.mark.parametrize(("value", "word"), [(torch.nan, "nan"), (torch.inf, "infinite")])
def test_a_loss_that_is_not_finite_is_named_and_the_state_before_it_kept(folder, tmp_path, value, word):
    spoils, noted, path = Spoils(4, value), Weights(), tmp_path / "diverged.ckpt"
    whole = Weights()
    fit(data(folder), tmp_path, callbacks=[whole])
    with pytest.raises(TrainingDivergedError) as caught:
        fit(data(folder), tmp_path, callbacks=[spoils, noted, Watchdog(str(path))])
    start, _, target = spoils.times
    words = f"the loss of z500 is {word} at {target}, step 2 of the forecast from {start}, in step 4 (epoch 1)"
    assert words in str(caught.value) and f"resume={path}" in str(caught.value) and "\n" not in str(caught.value)
    assert len(noted.steps) == 4
    again = Weights()
    fit(data(folder), tmp_path, callbacks=[again], resume=path)  # with the data mended
    assert len(again.steps) == 2 and torch.equal(again.steps[-1], whole.steps[-1])


def test_a_gradient_that_is_not_finite_is_named_before_it_reaches_the_weights(folder, tmp_path):
    path = tmp_path / "diverged.ckpt"
    with pytest.raises(TrainingDivergedError, match=r"gradient of model\.head\.bias is no finite .*, in step 2 \(epo"):
        fit(data(folder), tmp_path, callbacks=[Spoils(2, torch.nan, gradient=True), Watchdog(str(path))])
    stored = torch.load(path, weights_only=True)
    assert stored["global_step"] == 2 and all(x.isfinite().all() for x in stored["state_dict"].values())


def test_the_norm_of_the_gradient_is_clipped_and_batches_accumulate(folder, tmp_path):
    """Two accumulated batches of 4 are one of 8, with its clipped gradient."""
    settings = {"max_steps": 1, "gradient_clip_val": 1e-3, "num_sanity_val_steps": 0}
    one, _ = fit(data(folder), tmp_path, **settings)
    two, _ = fit(data(folder, batch_size=4), tmp_path, accumulate_grad_batches=2, **settings)
    gradients = [torch.cat([p.grad.flatten() for p in module.model.parameters()]) for module in (one, two)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-8)
    assert float(gradients[0].norm()) == pytest.approx(1e-3, rel=1e-4)


def test_a_training_without_progress_stops_early(folder, tmp_path):
    class Worse(lightning.Callback):
        def on_validation_epoch_end(self, trainer, module):
            module.log("worse", float(trainer.current_epoch))

    _, trainer = fit(
        data(folder), tmp_path, callbacks=[Worse(), EarlyStopping("worse", patience=2)], max_epochs=9,
        num_sanity_val_steps=0,
    )  # fmt: skip
    assert trainer.current_epoch == 3
    assert np.isfinite(float(trainer.callback_metrics["train/loss"]))


def test_maps_show_the_last_step_of_the_first_sample_in_its_units(folder, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(maps_module, "forecast_maps", lambda *told, steps: shown.append((*told, steps)))
    fit(data(folder), tmp_path, callbacks=[ForecastMaps(str(tmp_path / "maps"))])
    assert [(told[-2].name, told[-1]) for told in shown] == [("epoch_0.png", 2), ("epoch_1.png", 2)]
    forecast, truth, *_ = shown[0]
    assert truth.time.values.astype("datetime64[h]").astype(str).tolist() == [
        "2020-01-06T18",
        "2020-01-07T00",
        "2020-01-07T06",
    ]
    with xr.open_dataset(folder / "a.nc") as raw:
        for name in ("t2m", "z500", "sst", "tp"):
            expected = raw[name].sel(time=truth.time.values).values
            np.testing.assert_allclose(truth[name].values[1:], expected[1:], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(forecast.t2m.values[0], truth.t2m.values[0])
    assert forecast.sst.isnull().equals(truth.sst.isnull()) and truth.t2m.attrs["units"] == "K"
    assert not np.allclose(forecast.t2m.values[-1], truth.t2m.values[-1])


def test_throughput_tells_waits_from_work(monkeypatch):
    """By a clock that is set: per step 3 s for the batch, 5 s of work, of which 2 s for messages; 4 samples."""
    clock, logged = [0.0], []
    monkeypatch.setattr(throughput_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(throughput_module.Flight, "waited_s", 7.0)
    module = SimpleNamespace(
        recipe=SimpleNamespace(mesh=ProcessMesh()), device=torch.device("cpu"),
        log_dict=lambda values, prog_bar: logged.append(values),
    )  # fmt: skip
    trainer, batch = SimpleNamespace(log_every_n_steps=2, global_step=0), {"weight": torch.tensor([1.0] * 4 + [0.0])}
    callback = Throughput()
    callback.on_train_epoch_start(trainer, module)
    for _ in range(4):
        clock[0] += 3.0
        callback.on_train_batch_start(trainer, module, batch, 0)
        clock[0] += 5.0
        throughput_module.Flight.waited_s += 2.0
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, batch, 0)
        clock[0] += 100.0
        throughput_module.Flight.waited_s += 50.0
        callback.on_validation_end(trainer, module)  # which does not count
    assert len(logged) == 2
    for values in logged:
        assert values["speed/samples_per_s"] == 4 / 8 and values["speed/data_wait"] == 3 / 8
        assert values["speed/communication"] == 2 / 8 and values["speed/peak_gib"] > 0.05
