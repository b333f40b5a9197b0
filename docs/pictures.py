"""The pictures of "How it works", made by the code they show; mkdocs runs this before each build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from sfno_dist import Decomposition, Grid, Neighbourhood, ProcessMesh
from sfno_dist.comm import Reach

GRID = Grid("equiangular", 73, 144)
CUTOFF = np.radians(7.0)
ROWS = (4, 18, 36)  # 80, 45 and 0 degrees north
PLACE = 1  # the process whose halo is drawn, of 2 x 4


def on_pre_build(config: Any) -> None:
    make(Path(config["docs_dir"]) / "pictures")


def make(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    arcs().savefig(folder / "arcs.png", dpi=110)
    halo().savefig(folder / "halo.png", dpi=110)


def arcs() -> Figure:
    """Neighbours of a point in the middle of three rows."""
    neighbourhood = Neighbourhood(GRID, theta_cutoff=CUTOFF)
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axis = figure.subplots()
    longitudes, latitudes = np.meshgrid(GRID.longitudes_degrees - 180.0, GRID.latitudes_degrees)
    axis.plot(longitudes.ravel(), latitudes.ravel(), ".", color="0.85", markersize=1.5)
    columns = np.arange(GRID.nlon)
    for row in ROWS:
        query = GRID.nlon // 2
        apart = np.abs(columns - query)
        apart = np.minimum(apart, GRID.nlon - apart)
        inside = apart[None, :] <= neighbourhood.half_widths[row][:, None]
        axis.plot(longitudes[inside], latitudes[inside], "s", color="tab:blue", markersize=2.2)
        axis.plot(longitudes[row, query], latitudes[row, query], "o", color="tab:red", markersize=5)
    axis.set(xlabel="longitude", ylabel="latitude", xlim=(-180, 180), ylim=(-12, 91), xticks=range(-180, 181, 60))
    return figure


def halo() -> Figure:
    """Columns that a tile of 2 x 4 receives of each key row, and those that it owns."""
    tile = Decomposition(GRID, ProcessMesh.on_paper(polar=2, azimuth=4, rank=PLACE))
    reach = Reach(Neighbourhood(GRID, theta_cutoff=CUTOFF), tile, tile)
    needed = reach.touched(PLACE, slice(0, GRID.nlat), slice(0, GRID.nlon))
    needed[tile.rows, tile.columns] = False
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.barh(GRID.latitudes_degrees, needed.sum(1), height=2.1, color="tab:blue", label="received")
    axis.axhline(0.5 * (GRID.latitudes_degrees[tile.rows.stop - 1] + GRID.latitudes_degrees[tile.rows.stop]),
                 color="black", linewidth=0.8)  # fmt: skip
    axis.axvline(GRID.nlon - tile.tile_shape[1], color="black", linestyle="--", linewidth=1.0)
    axis.annotate("southern edge of the tile", (60, -6), fontsize=9)
    axis.set(xlabel="columns from other tiles", ylabel="latitude of the row", ylim=(-20, 91))
    return figure


if __name__ == "__main__":
    make(Path(__file__).parent / "pictures")
