"""The commands as a user gives them: train.py and sfno-dist, each in a process of its own."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from training.commands import ROOT, sfno_dist, train

from sfno_dist.training import checkpoint as checkpoints

NAVY = ROOT / "data" / "navy_winds_monthly_2.5deg.nc"
TINY = ["experiment=smoke", "trainer.accelerator=cpu", "+trainer.limit_train_batches=3"]
TINY += ["trainer.log_every_n_steps=1", "grid.latent.nlat=6", "grid.latent.nlon=12"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a short training run on the demo data."""
    cwd = tmp_path_factory.mktemp("trained")
    command = [sys.executable, ROOT / "train.py", *TINY]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (folder,) = (cwd / "runs" / "smoke").iterdir()
    (folder / "stdout.txt").write_text(done.stdout)
    return folder


@pytest.fixture(scope="session")
def best(trained) -> Path:
    return trained / "checkpoints" / "best.ckpt"


@pytest.mark.slow
def test_training_leaves_one_folder_with_everything_in_it(trained):
    assert (trained / "checkpoints" / "best.ckpt").is_file() and (trained / "checkpoints" / "last.ckpt").is_file()
    assert (trained / ".hydra" / "config.yaml").is_file() and (trained / "curves.png").stat().st_size > 10_000
    header = (trained / "csv" / "metrics.csv").read_text().splitlines()[0]
    assert "train/loss" in header and "validation/rmse_uwnd_model" in header
    assert list((trained / "tensorboard").glob("events.out.tfevents.*"))


@pytest.mark.slow
def test_baselines_as_the_product_computes_them_are_the_known_ones(trained):
    """Persistence 2.360 and 1.851 m/s, climatology 2.110 and 1.694, over the targets of 1991-92.

    The known values weigh rows by the cosine of latitude; ours are Clenshaw-Curtis weights: equal to 0.0002.
    """
    lines = (trained / "stdout.txt").read_text().split("\ntest:")[1].splitlines()
    table = {line.split()[0]: line.split() for line in lines if line.startswith(("uwnd", "vwnd"))}
    for variable, persistence, climatology in (("uwnd", 2.360, 2.110), ("vwnd", 1.851, 1.694)):
        assert float(table[variable][3]) == pytest.approx(persistence, abs=0.005)
        assert float(table[variable][4]) == pytest.approx(climatology, abs=0.005)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(tmp_path):
    weights = []
    for name in ("one", "two"):
        done = train(tmp_path, *TINY, f"name={name}", "seed=7")
        assert done.returncode == 0, done.stderr
        (file,) = (tmp_path / "runs" / name).glob("*/checkpoints/last.ckpt")
        weights.append(torch.load(file, weights_only=True)["state_dict"])
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.slow
def test_a_forecast_from_the_checkpoint_alone(best, tmp_path):
    copy = tmp_path / "elsewhere.ckpt"
    copy.write_bytes(best.read_bytes())
    done = sfno_dist(
        tmp_path, "forecast", copy, "--init", "1992-10", "--steps", 4, "--output", "f.nc", "--plot", "f.png"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with xr.open_dataset(tmp_path / "f.nc") as result, xr.open_dataset(NAVY) as data:
        assert set(result.data_vars) == {"uwnd", "vwnd"} and result.uwnd.shape == (1, 5, 73, 144)
        months = result.time.values[0].astype("datetime64[M]")
        assert months.tolist() == np.arange("1992-10", "1993-03", dtype="datetime64[M]").tolist()
        assert result.attrs["Conventions"].startswith("CF") and result.uwnd.attrs["units"] == "M/S"
        assert result.lat.attrs["standard_name"] == "latitude" and result.time.attrs["standard_name"] == "time"
        assert np.isfinite(result.uwnd).all() and result.init_time.values[0] == result.time.values[0, 0]
        # The first field is that of the file, turned to run from north to south and from 0 E.
        start = data.UWND.sel(TIME="1992-10").squeeze()
        for lat, lon in ((47.5, 10.0), (-30.0, 300.0)):
            expected = float(start.sel(FNOCY=lat, FNOCX=lon if lon >= 20 else lon + 360))
            assert float(result.uwnd.sel(lat=lat, lon=lon)[0, 0]) == pytest.approx(expected, abs=1e-3)
    assert (tmp_path / "f.png").stat().st_size > 30_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere.ckpt", "f.nc", "f.png"]


@pytest.mark.slow
def test_a_forecast_does_not_depend_on_the_order_of_the_data(best, tmp_path):
    with xr.open_dataset(NAVY) as data:
        data = data.isel(TIME=slice(108, 110)).load()
    turned = data.isel(FNOCY=slice(None, None, -1)).transpose("FNOCX", "TIME", "FNOCY").rename(UWND="uwnd")
    for name, version in (("a", data), ("b", turned.roll(FNOCX=17, roll_coords=True))):
        version.to_netcdf(tmp_path / f"{name}_in.nc")
        done = sfno_dist(
            tmp_path, "forecast", best, "--init", "1991-01", "--data", f"{name}_in.nc", "--output", f"{name}.nc"
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    with xr.open_dataset(tmp_path / "a.nc") as a, xr.open_dataset(tmp_path / "b.nc") as b:
        assert all(a[name].equals(b[name]) for name in a.variables)


@pytest.mark.slow
def test_an_interrupt_ends_the_run_and_leaves_a_whole_checkpoint(tmp_path):
    command = [sys.executable, ROOT / "train.py", *TINY, "trainer.max_epochs=100000"]
    # In the background of a script interrupts are ignored, and so they would be by what the tests start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        running = subprocess.Popen([str(word) for word in command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    for _ in range(600):
        if list(tmp_path.glob("runs/smoke/*/checkpoints/last.ckpt")):
            break
        time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode not in (0, None) and "Traceback" not in stderr
    (last,) = tmp_path.glob("runs/smoke/*/checkpoints/last.ckpt")
    checkpoints.load(last)


@pytest.mark.slow
def test_a_run_goes_on_from_its_last_checkpoint(trained, tmp_path):
    last = trained / "checkpoints" / "last.ckpt"
    done = train(tmp_path, *TINY, f"resume={last}", "trainer.max_epochs=2")
    assert done.returncode == 0, done.stderr
    (again,) = tmp_path.glob("runs/smoke/*/checkpoints/last.ckpt")
    steps = [torch.load(path, weights_only=True)["global_step"] for path in (last, again)]
    assert steps == [3, 6]


@pytest.mark.slow
def test_a_run_shorter_than_an_epoch_is_scored_with_its_last_weights(tmp_path):
    done = train(tmp_path, *TINY, "trainer.max_steps=2")
    assert done.returncode == 0 and "\ntest: one step" in done.stdout, done.stderr


@pytest.mark.slow
def test_runs_of_a_sweep_have_a_folder_each(tmp_path):
    done = train(tmp_path, "-m", *TINY, "seed=1,2")
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/smoke/sweep_*/[01]/checkpoints/best.ckpt"))) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--init", "2005-01"], "no data at 2005-01"),
        (["--init", "soon"], "--init: a time reads like"),
        (["--init", "1991-01", "--steps", "0"], "at least 1 step"),
        (["--init", "1991-01", "--data", "absent.nc"], "absent.nc"),
        (["--init", "1991-01", "--data", "other.nc"], "other.nc"),
        (["--init", "1991-01", "--data", "knots.nc"], "uwnd is in 'knots', the checkpoint was trained on 'M/S'"),
        (
            ["--init", "1991-01", "--data", "coarse.nc"],
            "equiangular 37 x 72, the checkpoint is for equiangular 73 x 144",
        ),
        (["--init", "1991-01", "--output", "nowhere/f.nc"], "does not exist"),
        (
            ["--init", "1991-01", "--data", "knots.nc", "--output", "knots.nc"],
            "knots.nc: is no forecast that sfno-dist wrote; name another output",
        ),
    ],
)
def test_forecasts_that_cannot_be_made_are_refused_with_one_line(best, tmp_path, arguments, words):
    with xr.open_dataset(NAVY) as data:
        data = data.isel(TIME=slice(108, 110)).load()
    data[["UWND"]].to_netcdf(tmp_path / "other.nc")
    data.isel(FNOCY=slice(None, None, 2), FNOCX=slice(None, None, 2)).to_netcdf(tmp_path / "coarse.nc")
    data.UWND.attrs["units"] = "knots"
    data.to_netcdf(tmp_path / "knots.nc")
    output = [] if "--output" in arguments else ["--output", "f.nc"]
    done = sfno_dist(tmp_path, "forecast", best, *output, *arguments)
    assert_one_line(done, words)
    assert not list(tmp_path.glob("**/*f.nc*"))


@pytest.mark.parametrize("kind", ["absent", "text", "truncated", "foreign", "newer"])
def test_files_that_are_no_checkpoint_are_refused_with_one_line(request, tmp_path, kind):
    path = tmp_path / "c.ckpt"
    if kind == "text":
        path.write_text("weights")
    elif kind == "truncated":
        torch.save({"state_dict": {"a": torch.zeros(1000)}}, path)
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "foreign":
        torch.save({"state_dict": {}}, path)
    elif kind == "newer":
        torch.save({"state_dict": {}, "sfno_dist": {"format": 999}}, path)
    done = sfno_dist(tmp_path, "forecast", path, "--init", "1991-01", "--output", "f.nc")
    assert_one_line(done, "c.ckpt")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.paths=absent.nc"], "absent.nc"),
        (["data.variables=[uwnd,temperature]"], "temperature"),
        (["grid=era5_1deg"], "equiangular 73 x 144, the configuration names equiangular 181 x 360"),
        (["grid.latent.kind=octahedral"], "unknown grid kind 'octahedral'; choose one of equiangular"),
        (["model.num_heads=5"], "num_heads=5 does not divide"),
        (["mesh.polar=2", "trainer.devices=3"], "3 processes make mesh.data=1 mesh.polar=1 mesh.azimuth=3"),
        (["trainer.devices=2"], "trainer.devices=2, but the mesh of 1 x 1 x 1 = 1 processes"),
        (["mesh=azimuth2", "data.paths=absent.nc"], "absent.nc"),
        (["+trainer.strategy=ddp"], "trainer.strategy: the mesh decides it"),
        (["trainer.accelerator=gpu"], "trainer: "),
        (["data.splits.test=[1989-06,1992]"], "train and test overlap"),
        (["data.features=[moon]"], "unknown feature 'moon'"),
        (["data.step=fortnight"], "time step"),
        (["data.paths=gap.nc"], "NaN"),
        (
            ["data.paths=late_gap.nc", "data.num_workers=1"],
            "late_gap.nc: uwnd has 1 of 21024 values NaN at time 1992-06",
        ),
        (["data.paths=north.nc"], "not global"),
        (["+data.nonsense=1"], "nonsense"),
        (["optim.warmup=often"], "optim.warmup is a share of all steps"),
        (["+nonsense=1"], "nothing reads the setting nonsense"),
    ],
)
def test_runs_that_cannot_start_say_why_in_one_line(tmp_path, overrides, words):
    with xr.open_dataset(NAVY) as data:
        data = data.load()
    if overrides == ["data.paths=gap.nc"]:
        data.UWND[5, 3, 7] = np.nan
        data.to_netcdf(tmp_path / "gap.nc")
    if overrides[0] == "data.paths=late_gap.nc":  # in the test period: found in a worker, after the training
        data.UWND[125, 3, 7] = np.nan
        data.to_netcdf(tmp_path / "late_gap.nc")
    if overrides == ["data.paths=north.nc"]:
        data.isel(FNOCY=slice(36, None)).to_netcdf(tmp_path / "north.nc")
    assert_one_line(train(tmp_path, *TINY, *overrides), words)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=transfomer"], "Could not find 'model/transfomer'"),
        (["trainer.max_epoch=3"], "Key 'max_epoch' is not in struct"),
        (["experiment=none_such"], "Could not find 'experiment/none_such'"),
    ],
)
def test_wrong_overrides_give_hydras_own_error(tmp_path, overrides, words):
    done = train(tmp_path, *overrides)
    assert done.returncode != 0 and words in done.stderr and "Traceback" not in done.stderr


def test_help_names_the_groups_and_examples(tmp_path):
    done = train(tmp_path, "--help")
    assert done.returncode == 0
    for words in (
        "Trains a spherical transformer",
        "experiment: ",
        "python train.py experiment=smoke",
        "batch_size: 2",
        "data=era5",
    ):
        assert words in done.stdout
    assert sfno_dist(tmp_path, "forecast", "--help").returncode == 0


def assert_one_line(done: subprocess.CompletedProcess, words: str) -> None:
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "Traceback" not in done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and words in errors[0], done.stderr
