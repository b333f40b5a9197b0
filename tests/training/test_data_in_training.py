"""The DataModule in Lightning's own loop: resumed in mid-epoch, every role trained and forecast, errors on the way."""

import lightning
import numpy as np
import pytest
import torch
import xarray as xr
from lightning.pytorch.callbacks import ModelCheckpoint
from small_archive import GRID, LAND, archive, everything
from training.commands import train
from training.test_command_line import NAVY, TINY

from sfno_dist import ProcessMesh
from sfno_dist.data import DataError
from sfno_dist.forecasts import Request, forecast
from sfno_dist.training.callbacks import Scores
from sfno_dist.training.checkpoint import build_model
from sfno_dist.training.losses import area_means, mean_loss
from sfno_dist.training.module import ForecastModule
from sfno_dist.training.resume import KeepLast

SHARES = torch.from_numpy(GRID.area_shares).float()


class Recorder(lightning.LightningModule):
    """Learns nothing; notes which times each training batch holds."""

    def __init__(self):
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_index):
        self.seen.append((self.current_epoch, batch_index, batch["times"][:, 0].tolist()))
        return self.parameter * batch["state"].mean()

    def validation_step(self, batch, batch_index):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(data, folder, *, resume=None, **options):
    module = Recorder()
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        **{"max_epochs": 3, "num_sanity_val_steps": 0, **options},
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    return module.seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    archive(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    return fit(data(folder), folder, callbacks=[])


def data(folder, **changes):
    return everything(folder, str(folder / "a.nc"), rollout_steps=1, **changes)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [2, 6, 11])  # an epoch has 6 batches
def test_a_run_goes_on_with_the_batch_after_the_last_one(folder, whole, tmp_path, steps, workers):
    kept = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(data(folder, num_workers=workers), tmp_path, callbacks=[kept], max_steps=12)
    assert len(whole) == 18 and [len(times) for _, _, times in whole[:6]] == [4, 4, 4, 4, 4, 3]
    rest = fit(data(folder, num_workers=workers), tmp_path, resume=tmp_path / f"step={steps}.ckpt", callbacks=[])
    assert rest == whole[steps:]


def test_a_run_goes_on_after_the_end_of_an_epoch(folder, whole, tmp_path):
    kept = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    fit(data(folder), tmp_path, callbacks=[kept], max_epochs=2)
    rest = fit(data(folder, num_workers=1), tmp_path, resume=tmp_path / "epoch=1.ckpt", callbacks=[])
    assert rest == whole[12:]


def test_every_role_is_trained_and_forecast(folder, tmp_path):
    """Prognostic, diagnostic with a log, prescribed, and one with missing values, through the module and back."""
    changes = {"variables": ["t2m", "sst"], "prescribed": ["z500"], "batch_size": 8}
    archive_data = data(folder, **changes)
    archive_data.setup()
    recipe = archive_data.recipe
    settings = {"name": "SphericalTransformer", "embed_channels": 8, "depth": 1, "num_heads": 2}
    settings["latent_grid"] = {"kind": "legendre-gauss", "nlat": 6, "nlon": 12}
    model = build_model(settings, recipe)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    module = ForecastModule(model, recipe, model_settings=settings, optimizer=lambda g: torch.optim.AdamW(g, lr=1e-3))
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
        default_root_dir=tmp_path, callbacks=[Scores()],
    )  # fmt: skip
    trainer.fit(module, datamodule=archive_data)
    assert np.isfinite(float(trainer.callback_metrics["train/loss"]))
    persistence = brute_force_persistence(folder)
    for name, value in persistence.items():
        assert float(trainer.callback_metrics[f"validation/rmse_{name}_persistence"]) == pytest.approx(value, rel=1e-4)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    request = Request(str(tmp_path / "c.ckpt"), str(tmp_path / "f.nc"), ["2020-01-09"], 3, data=[str(folder / "a.nc")])
    forecast(request, ProcessMesh())
    with xr.open_dataset(tmp_path / "f.nc") as result:
        assert list(result.data_vars) == ["t2m", "sst", "tp"] and float(result.tp.min()) >= 0.0
        sst = result.sst.values[0]
        assert np.isnan(sst[:, LAND]).all() and np.isfinite(sst[:, ~LAND]).all()


def brute_force_persistence(folder) -> dict[str, float]:
    """Of the samples that end in the validation period, by xarray and NumPy alone."""
    with xr.open_dataset(folder / "a.nc") as raw:
        raw = raw[["t2m", "sst", "tp"]].sel(time=slice("2020-01-06T18", "2020-01-08")).load()
    change = (raw.isel(time=slice(1, None)).drop_vars("time") - raw.isel(time=slice(-1)).drop_vars("time")) ** 2
    area = xr.DataArray(GRID.cell_areas, dims="latitude")
    return {name: float(np.sqrt(change[name].weighted(area).mean())) for name in change}


def test_the_loss_skips_missing_cells_and_stand_ins():
    prediction, target = torch.randn(2, 5, 1, 3, *GRID.shape)
    valid = torch.rand(5, 1, 3, *GRID.shape) > 0.4
    valid[:, :, 0] = True
    target = torch.where(valid, target, torch.nan)
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    squares = ((prediction - target) ** 2).double().numpy()[:, 0]
    area = np.broadcast_to(GRID.cell_areas[:, None], GRID.shape)
    of_fields = [[np.average(x[~np.isnan(x)], weights=area[~np.isnan(x)]) for x in row] for row in squares]
    loss = mean_loss(area_means(prediction, target, SHARES, valid=valid), torch.ones(3), weight)
    assert float(loss) == pytest.approx(np.mean(of_fields[:4]) * 4 / 5, rel=1e-5)


@pytest.mark.parametrize("loss", ["mse", "l1", "huber"])
def test_the_gradient_of_a_missing_cell_is_zero(loss):
    prediction = torch.randn(1, 1, *GRID.shape, requires_grad=True)
    valid = torch.rand(1, 1, *GRID.shape) > 0.4
    target = torch.where(valid, torch.randn(1, 1, *GRID.shape), torch.nan)
    area_means(prediction, target, SHARES, losses=(loss,), valid=valid).sum().backward()
    assert torch.equal(prediction.grad != 0, valid)


@pytest.mark.parametrize(("bad_step", "workers"), [(3, 0), (3, 2), (8, 0)])
def test_data_that_turn_bad_stop_the_run_where_it_goes_on_once_they_are_mended(
    folder, whole, tmp_path, bad_step, workers
):
    bad = data(folder, num_workers=workers)
    bad.setup()
    read, last = bad.reader.read, tmp_path / "last.ckpt"
    epoch, _, starts = whole[bad_step]

    def read_until_bad(indices):
        if bad.batches["train"].epoch == epoch and int(bad.reader.dates[indices[0]].astype(int)) == starts[-1]:
            raise DataError("a.nc: t2m cannot be read (input/output error); copy the file again")
        return read(indices)

    bad.reader.read = read_until_bad
    with pytest.raises(DataError, match=r"^a\.nc: t2m cannot be read \(input/output error\); copy the file again$"):
        fit(bad, tmp_path, callbacks=[KeepLast(str(tmp_path), every_n_steps=100)])
    assert fit(data(folder, num_workers=workers), tmp_path, resume=last, callbacks=[]) == whole[bad_step:]


@pytest.mark.slow
def test_a_value_that_is_bad_later_ends_the_command_with_one_line_and_a_checkpoint(tmp_path):
    """In the second batch of the validation, after the first epoch."""
    with xr.open_dataset(NAVY) as navy:
        navy = navy.load()
    navy.UWND[101, 3, 7] = np.nan  # 1990-06
    navy.to_netcdf(tmp_path / "a.nc")
    done = train(tmp_path, *TINY, "data.paths=a.nc", "data.num_workers=1")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert len(errors) == 1 and "a.nc: uwnd has 1 of 21024 values NaN at time 1990-06" in errors[0]
    (last,) = tmp_path.glob("runs/smoke/*/checkpoints/last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 3 and f"resume={last.resolve()}" in done.stdout
