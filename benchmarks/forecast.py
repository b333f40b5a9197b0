"""What a forecast costs beside its model, and whether its memory grows with its length.

    python benchmarks/forecast.py [--folder F]

Models that were not trained (latent grid 90 x 180; 64 channels in 4 blocks, 256 in 8) on 20 variables of a 1 degree
grid, 2 prescribed ones among them, on one process, into netCDF and into zarr. The time within the model is what its
forward takes; all else counts as outside of it: opening files, reading the initial and the prescribed fields, features,
writing the fields and the states to go on from, and making netCDF at the end. Reading the checkpoint and building the
model happen once, however many forecasts follow, and stand beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from table import Table

from data import GLOBE_NC, VARIABLES, make
from sfno_dist import ProcessMesh
from sfno_dist.data.datamodule import WeatherDataModule
from sfno_dist.forecasts import Request, forecast
from sfno_dist.forecasts import run as runs
from sfno_dist.training import checkpoint as checkpoints

# channels, blocks, steps
RUNS = ((64, 4, 10), (64, 4, 40), (64, 4, 160), (256, 8, 40))
TIMES = 161
MEBI = 2**20
LATENT = {"kind": "legendre-gauss", "nlat": 90, "nlon": 180}
SETTINGS = {"name": "SphericalTransformer", "num_heads": 4, "latent_grid": LATENT}
COLUMNS = (
    ("channels", "channels", "d"),
    ("blocks", "blocks", "d"),
    ("output", "output", "s"),
    ("steps", "steps", "d"),
    ("start s", "start_s", ".2f"),
    ("model s", "model_s", ".2f"),
    ("outside s", "outside_s", ".2f"),
    ("outside %", "outside", ".1f"),
    ("peak MiB", "peak_mib", ".0f"),
    ("file MiB", "file_mib", ".0f"),
)


def checkpoints_of_all_models(folder: Path) -> None:
    splits = {"train": ["2000-01-01", "2000-01-04"], "validation": ["2000-01-05", "2000-01-06"]}
    splits["test"] = ["2000-01-07", "2000-01-09"]
    data = WeatherDataModule(
        str(folder / GLOBE_NC), VARIABLES[:18], prescribed=VARIABLES[18:], splits=splits,
        features=("position", "year_phase", "cos_zenith"),
    )  # fmt: skip
    data.setup()
    for channels, blocks, _ in RUNS:
        torch.manual_seed(0)
        settings = {**SETTINGS, "embed_channels": channels, "depth": blocks}
        model = checkpoints.build_model(settings, data.recipe)
        weights = {checkpoints.MODEL_PREFIX + name: value for name, value in model.state_dict().items()}
        ours = checkpoints.contents(settings, data.recipe, [str(folder / GLOBE_NC)])
        torch.save({"state_dict": weights, checkpoints.KEY: ours}, folder / f"{channels}.ckpt")


def one(folder: Path, output: str, channels: str, steps: int) -> None:
    """Prints the numbers of one forecast: seconds to start, in the model and in all, peak bytes, bytes written."""
    spent = {"model": 0.0, "start": 0.0}

    def timed(work, key):
        def measured(*arguments, **options):
            start = time.perf_counter()
            try:
                return work(*arguments, **options)
            finally:
                spent[key] += time.perf_counter() - start

        return measured

    load = checkpoints.load

    def loaded_and_timed(*arguments):
        loaded = timed(load, "start")(*arguments)
        loaded.model.forward = timed(loaded.model.forward, "model")
        return loaded

    runs.checkpoints.load = loaded_and_timed
    start = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):
        forecast(Request(str(folder / f"{channels}.ckpt"), str(folder / output), ["2000-01-01"], steps), ProcessMesh())
    wall = time.perf_counter() - start
    path = folder / output
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")))
    print(spent["start"], spent["model"], wall, peak_bytes(), size)


def peak_bytes() -> int:
    """Of this process since it began; what getrusage says may be of the one that started it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the data are made (default: a temporary folder)")
    parser.add_argument("--csv", type=Path, help="also writes the numbers")
    parser.add_argument("--one", nargs=3, metavar=("OUTPUT", "CHANNELS", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.folder, *options.one[:2], int(options.one[2]))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / GLOBE_NC).exists():
            make(folder, times=TIMES)
        checkpoints_of_all_models(folder)
        table = Table(COLUMNS, options.csv)
        for output in ("f.nc", "f.zarr"):
            for channels, blocks, steps in RUNS:
                # A process of its own for each, whose peak memory is that of one forecast.
                words = [sys.executable, __file__, "--folder", folder, "--one", output, channels, steps]
                done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True)
                start, model, wall, peak, size = map(float, done.stdout.split())
                outside = wall - start - model
                table.add({
                    "channels": channels, "blocks": blocks, "output": output, "steps": steps, "start_s": start,
                    "model_s": model, "outside_s": outside, "outside": 100 * outside / (wall - start),
                    "peak_mib": peak / MEBI, "file_mib": size / MEBI,
                })  # fmt: skip


if __name__ == "__main__":
    main()
