"""Every choice of every configuration group builds what it names, and every experiment takes a step."""

import importlib.util
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig

from sfno_dist.geometry import Grid
from sfno_dist.mesh import ProcessMesh
from sfno_dist.training import run
from sfno_dist.training.checkpoint import load
from sfno_dist.training.config import ConfigError
from sfno_dist.training.hydra_run import wanted
from sfno_dist.training.launch import Processes

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
SMALL = ["model.embed_channels=8", "model.depth=1", "model.num_heads=2", "grid.latent.nlat=6", "grid.latent.nlon=12"]


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def composed(tmp_path: Path, *overrides: str) -> DictConfig:
    os.environ["SFNO_DIST_ROOT"] = str(ROOT)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", [f"paths.output={tmp_path}", "name=test", "trainer.accelerator=cpu", *overrides])


def test_the_groups_are_those_of_the_design():
    expected = "callbacks data experiment grid logger mesh model optim paths trainer"
    assert expected.split() == GROUPS


def small_era5(folder: Path) -> str:
    """Random t2m and z on levels, daily over the years of conf/data/era5.yaml."""
    grid, rng = Grid("equiangular", 7, 12), np.random.default_rng(0)
    times = np.arange("2015-12-20", "2018-01-10", dtype="datetime64[D]").astype("datetime64[ns]")
    sizes = {"t2m": ("time", "lat", "lon"), "z": ("time", "level", "lat", "lon")}
    shapes = {"t2m": (len(times), *grid.shape), "z": (len(times), 2, *grid.shape)}
    xr.Dataset(
        {name: (dims, rng.standard_normal(shapes[name]).astype("f4")) for name, dims in sizes.items()},
        {"time": times, "level": ("level", [500, 850], {"units": "hPa"}), "lat": grid.latitudes_degrees}
        | {"lon": grid.longitudes_degrees},
    ).to_netcdf(folder / "era5.nc")
    return str(folder / "era5.nc")


@pytest.mark.parametrize("choice", choices("data"))
def test_data(choice, tmp_path):
    config = composed(tmp_path, f"data={choice}", *([f"data.paths={small_era5(tmp_path)}"] * (choice == "era5")))
    data = run.build_data(config)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert batch["state"].shape[2] == len(data.recipe.variables)
    assert torch.isfinite(batch["state"]).all() and torch.isfinite(batch["features"]).all()


@pytest.mark.parametrize("choice", choices("grid"))
def test_grid(choice, tmp_path):
    grid = composed(tmp_path, f"grid={choice}").grid
    assert set(grid) == {"data", "latent"}
    for part in grid.values():
        assert part == "auto" or Grid(**part).weights.sum() == pytest.approx(2.0)


@pytest.mark.parametrize("choice", choices("mesh"))
def test_mesh(choice, tmp_path):
    mesh = composed(tmp_path, f"mesh={choice}").mesh
    named = {axis: int(count) for axis, count in re.findall(r"([a-z]+)(\d+)", choice)}
    assert {axis: mesh[axis] for axis in ("data", "polar", "azimuth") if mesh[axis] > 1} == named
    assert wanted(composed(tmp_path, f"mesh={choice}"), Processes()) == math.prod(named.values())


@pytest.mark.parametrize("choice", choices("model"))
def test_model(choice, tmp_path):
    config = composed(tmp_path, f"model={choice}", *SMALL)
    data = run.build_data(config)
    data.setup()
    model = run.build_module(config, data).model
    y = model(torch.randn(1, data.recipe.in_channels, *data.recipe.grid.shape))
    assert y.shape == (1, data.recipe.state_channels, *data.recipe.grid.shape)


@pytest.mark.parametrize("choice", choices("optim"))
def test_optim(choice, tmp_path):
    optim = instantiate(composed(tmp_path, f"optim={choice}").optim)
    optimizer = optim["optimizer"]([{"params": [torch.nn.Parameter(torch.ones(2))]}])
    assert isinstance(optimizer, torch.optim.Optimizer) and 0 <= optim["warmup"] < 1


@pytest.mark.parametrize(
    ("group", "choice"), [(group, choice) for group in ("callbacks", "logger", "trainer") for choice in choices(group)]
)
def test_trainer_with_its_callbacks_and_loggers(group, choice, tmp_path):
    config = composed(tmp_path, f"{group}={choice}")
    if choice in ("wandb", "mlflow") and importlib.util.find_spec(choice) is None:
        with pytest.raises(ConfigError, match=rf"^logger\.{choice}: .*pip install -U '{choice}"):
            run.build_trainer(config, ProcessMesh())
        return
    trainer = run.build_trainer(config, ProcessMesh())
    assert len(trainer.loggers) == len(config.logger) and trainer.num_devices == 1
    assert {type(c).__name__ for c in trainer.callbacks} >= {
        c["_target_"].rsplit(".")[-1] for c in config.callbacks.values()
    }


@pytest.mark.parametrize("choice", choices("paths"))
def test_paths(choice, tmp_path):
    assert (Path(composed(tmp_path, f"paths={choice}").paths.data) / "README.md").is_file()


@pytest.mark.parametrize("choice", choices("experiment"))
def test_every_experiment_takes_a_step(choice, tmp_path):
    config = composed(
        tmp_path, f"experiment={choice}", *SMALL, "trainer.max_epochs=1", "+trainer.limit_train_batches=1",
        "+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1",
    )  # fmt: skip
    metrics = run.train(config)
    assert metrics["train/loss"] > 0 and metrics["test/loss"] > 0
    assert (tmp_path / "checkpoints" / "best.ckpt").is_file()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run.train(composed(tmp_path_factory.mktemp("plain"), *TWO_STEPS))


TWO_STEPS = [
    *SMALL, "trainer.max_epochs=1", "+trainer.limit_train_batches=2", "+trainer.limit_val_batches=1",
    "+trainer.limit_test_batches=1", "trainer.num_sanity_val_steps=0",
]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "close"),
    [
        ("model.recompute_blocks=true", 1e-6),
        ("model.compile=true", 1e-4),
        ("trainer.precision=bf16-mixed", 1e-2),
        ("callbacks=[default,average,early_stop]", 1e-6),
        ("optim.objective.weights={uwnd: 1.0}", 1e-6),
    ],
)
def test_what_changes_speed_or_memory_trains_to_the_same(plain, tmp_path, override, close):
    metrics = run.train(composed(tmp_path, *TWO_STEPS, override))
    assert metrics["train/loss"] == pytest.approx(plain["train/loss"], rel=close)
    assert metrics["train/gradient_norm"] == pytest.approx(plain["train/gradient_norm"], rel=10 * close)
    # Both steps, but not the average of their weights, make this.
    assert metrics["test/loss"] == pytest.approx(plain["test/loss"], rel=max(close, 1e-2 * ("average" in override)))
    load(tmp_path / "checkpoints" / "best.ckpt")


def test_a_setting_that_nothing_reads_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="nothing reads the setting learning_rate"):
        run.train(composed(tmp_path, "+learning_rate=1"))
    for section in (
        "data",
        "grid",
        "grid.latent",
        "mesh",
        "model",
        "optim",
        "trainer",
        "callbacks.checkpoint",
        "logger.csv",
    ):
        with pytest.raises(ValueError, match="nonsense"):
            run.train(composed(tmp_path, f"+{section}.nonsense=1", *SMALL))
