"""A checkpoint of a small model with every kind of variable, not trained but not trivial, and its archive."""

from pathlib import Path

import numpy as np
import torch
import xarray as xr
from small_archive import archive, everything

from sfno_dist.training import checkpoint as checkpoints

SETTINGS = {"name": "SphericalTransformer", "embed_channels": 8, "depth": 1, "num_heads": 2}
SETTINGS["latent_grid"] = {"kind": "legendre-gauss", "nlat": 6, "nlon": 12}


def checkpoint(folder: Path, **changes) -> tuple[Path, str]:
    """The checkpoint and the file of its data, in ``folder``."""
    path = archive(folder)
    options = {"variables": ["t2m", "sst"], "prescribed": ["z500"], **changes}
    data = everything(folder, path, rollout_steps=1, **options)
    data.setup()
    torch.manual_seed(1)
    model = checkpoints.build_model(SETTINGS, data.recipe)
    torch.nn.init.normal_(model.head.weight, std=0.02)
    weights = {checkpoints.MODEL_PREFIX + name: value for name, value in model.state_dict().items()}
    ours = checkpoints.contents(SETTINGS, data.recipe, [path])
    torch.save({"state_dict": weights, checkpoints.KEY: ours}, folder / "c.ckpt")
    return folder / "c.ckpt", path


def fields(path: Path) -> xr.Dataset:
    with xr.open_dataset(path, decode_timedelta=True) as dataset:
        return dataset.load()


def same(a: xr.Dataset, b: xr.Dataset) -> bool:
    """Bit for bit, coordinates and attributes too."""
    return a.identical(b) and all(
        np.array_equal(a[name].values.view(np.int32), b[name].values.view(np.int32)) for name in a.data_vars
    )
