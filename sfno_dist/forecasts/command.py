"""``sfno-dist forecast``: starts the processes of the layout, or joins those of torchrun or srun."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import xarray as xr

from sfno_dist.data.samples import FieldReader
from sfno_dist.forecasts.run import Request, checked_output, forecast
from sfno_dist.forecasts.store import open_finished
from sfno_dist.mesh import Decomposition, ProcessMesh
from sfno_dist.training import checkpoint, launch, plot
from sfno_dist.training.config import ConfigError

PICTURES = (".png", ".pdf", ".svg", ".jpg", ".webp")
PATIENCE = 24 * 3600.0  # s: replicas end at different times; one that is killed is noticed at once


def run(request: Request, layout: ProcessMesh, *, command: Sequence[str], picture: str | None) -> None:
    """``layout`` is that wanted, on paper; ``command`` what each process is to run, of this Python."""
    launch.end_with_the_command()
    try:
        _run(request, layout, command=command, picture=picture)
    except KeyboardInterrupt:
        if launch.Processes.of(os.environ).rank == 0:
            print("\ninterrupted; the same command goes on from there", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _run(request: Request, layout: ProcessMesh, *, command: Sequence[str], picture: str | None) -> None:
    if picture:
        _check_picture(Path(picture))
    processes = launch.Processes.of(os.environ)
    launch.refuse_other_size(layout.sizes, processes)
    if layout.size > processes.size:
        for grid in checkpoint.grids(request.checkpoint):
            Decomposition(grid, layout)  # an error before a mistyped layout starts hundreds of processes
        launch.start(layout.size, command)
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu and processes.per_node > torch.cuda.device_count():
        raise ConfigError(
            f"{processes.per_node} processes on this node, which has {torch.cuda.device_count()} GPUs; start one for "
            f"each GPU, or none of them with CUDA_VISIBLE_DEVICES= in the environment"
        )
    device = torch.device("cuda", processes.local_rank) if on_gpu else torch.device("cpu")
    with launch.joined(processes, on_gpu=on_gpu, timeout_s=PATIENCE):
        mesh = ProcessMesh(*layout.sizes, row_balance=layout.row_balance, timeout_s=PATIENCE)
        made = forecast(request, mesh, device)
    if processes.rank == 0:
        print(f"wrote {request.output}: {_summary(request, made)}")
        if picture:
            draw(request, picture)
            print(f"wrote {picture}")


def _check_picture(path: Path) -> None:
    """``ConfigError`` before the forecast, which may take hours, where no picture could be drawn after it."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.parent} does not exist; create it first")
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"--plot {path}: name a picture that ends with {', '.join(PICTURES)}")
    if path.is_dir():
        raise ConfigError(f"--plot {path}: is a folder; name a file in it")


def _summary(request: Request, made: int) -> str:
    with open_finished(checked_output(request.output)) as result:
        counts = {dim: result.sizes[dim] for dim in ("init_time", "member") if dim in result.sizes}
        names = ", ".join(map(str, result.data_vars))
        one = "all there already" if made == 0 else f"{made} new" if made < counts["init_time"] else ""
        many = " x ".join(f"{count} {dim.replace('_', ' ')}s" for dim, count in counts.items() if count > 1)
        said = [names, f"{request.steps} x {result.step.attrs['long_name'].removeprefix('steps of ')}", many, one]
        return ", ".join(filter(None, said))


def draw(request: Request, picture: str) -> None:
    """Maps of the last step of the first initial time, the mean of an ensemble, beside the truth where there is one."""
    loaded = checkpoint.load(request.checkpoint)
    with open_finished(checked_output(request.output)) as result:
        first = result.isel(init_time=0).swap_dims(step="time").isel(time=[0, -1]).load()
        steps = result.sizes["step"] - 1
    first = first.mean("member", keep_attrs=True) if "member" in first.dims else first
    reader = FieldReader.of(loaded.recipe, request.data or loaded.data_paths)
    ordinals = loaded.recipe.step.ordinals
    place = (ordinals(reader.times) == ordinals(first.time.values[-1:])[0]).nonzero()[0]
    truth = None
    if len(place):
        fields = reader(int(place[0]))
        variables = enumerate(loaded.recipe.outputs)
        truth = xr.Dataset({name: (("time", "lat", "lon"), fields[None, v]) for v, name in variables})
    plot.forecast_maps(first, truth, loaded.recipe, picture, steps=steps)
