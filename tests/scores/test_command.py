"""``sfno-dist score`` as a user gives it, and its page as a browser shows it."""

import os
import re
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from forecast_files import forecast_of, truth_file
from matplotlib import image
from training.commands import sfno_dist

from sfno_dist import Grid
from sfno_dist.scores.command import score
from sfno_dist.scores.forecasts import Forecasts
from sfno_dist.scores.truth import Truth
from sfno_dist.scores.verify import verify

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> Path:
    """A folder with the scores of an ensemble, and what the command printed."""
    folder = tmp_path_factory.mktemp("scored")
    truth = truth_file(folder, gaps=True)
    forecast_of(truth, [0, 3, 7], 4, members=3).to_netcdf(folder / "f.nc")
    options = ["--climatology", "2020-01-01:2020-01-11", "--output", "s.nc", "--report", "s.html"]
    done = sfno_dist(folder, "score", "f.nc", "truth.nc", *options)
    assert done.returncode == 0, done.stderr
    (folder / "printed.txt").write_text(done.stdout)
    return folder


def test_the_table_and_the_file_hold_the_same_scores(scored):
    lines = (scored / "printed.txt").read_text().splitlines()
    head = lines[1].split()
    columns = ["variable", "units", "lead", "fields", "RMSE", "persistence", "climatology"]
    assert head == [*columns, "MAE", "bias", "ACC", "CRPS", "spread", "spread/skill"]
    with xr.open_dataset(scored / "s.nc", decode_timedelta=False) as result:
        first = lines[2].split()
        assert first[:3] == ["t2m", "K", "6"] and first[4] == "3"  # "6 h" in two words, three fields
        one = result.sel(variable="t2m", lead_time=6.0, region="globe")
        for cell, value in zip(
            first[5:],
            [*one.rmse, *(one[name][0] for name in ("mae", "bias", "acc", "crps", "spread", "spread_skill"))],
            strict=True,
        ):
            assert float(cell) == pytest.approx(float(value), rel=1e-3)
        assert result.forecast.values.tolist() == ["forecast", "persistence", "climatology"]
        assert result.power.dims == ("source", "variable", "lead_time", "region", "wavenumber")
        assert result.attrs["climatology"].startswith("truth of 2020-01-01 to 2020-01-11")
    assert sorted(path.name for path in scored.iterdir()) == ["f.nc", "printed.txt", "s.html", "s.nc", "truth.nc"]


def test_the_page_asks_for_nothing_beyond_itself(scored):
    page = (scored / "s.html").read_text()
    assert "<script" not in page and "url(" not in page and "@import" not in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert page.count("<img ") == 3 * 2 == len(re.findall(r'alt="[^"]+"', page))


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_a_browser_shows_the_page(scored, tmp_path):
    """Every picture is decoded, nothing is fetched or runs over the side; the curves are there in their colour."""
    script = """<script>addEventListener("load", () => document.body.dataset.seen = [
        [...document.images].map(i => i.complete && i.naturalWidth > 600 && i.getBoundingClientRect().height > 150),
        performance.getEntriesByType("resource").filter(r => !r.name.startsWith("data:")).length,
        document.documentElement.scrollWidth - innerWidth,
        [...document.querySelectorAll("nav a")].map(a => !!document.querySelector(a.getAttribute("href")))
        ].join("|"))</script></body>"""
    page = (scored / "s.html").read_text().replace("</body>", script)
    (tmp_path / "probed.html").write_text(page.replace("default-src 'none'", "script-src 'unsafe-inline'"))
    dump = browse(tmp_path, "--dump-dom", (tmp_path / "probed.html").as_uri())
    pictures, fetched, beyond, links = re.search(r'data-seen="([^"]*)"', dump)[1].split("|")
    assert pictures == ",".join(["true"] * 6) and links == "true,true"
    assert int(fetched) == 0 and int(beyond) <= 0
    browse(tmp_path, f"--screenshot={tmp_path / 's.png'}", (scored / "s.html").as_uri())
    shown = (image.imread(tmp_path / "s.png")[..., :3] * 255).round()
    blue = (np.abs(shown - (0x1F, 0x5F, 0xA8)).max(-1) < 12).sum()
    assert blue > 500 and (shown == 255).all(-1).mean() > 0.5  # curves, on white


def browse(folder: Path, *arguments: str) -> str:
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,3000", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_memory_does_not_grow_with_the_number_of_initial_times(tmp_path):
    grid, peaks = Grid("equiangular-offset", 60, 120), []
    axes = {"lat": grid.latitudes_degrees, "lon": grid.longitudes_degrees}
    times = np.datetime64("2020-01-01", "ns") + np.arange(70) * np.timedelta64(6, "h")
    fields = np.random.default_rng(0).standard_normal((70, *grid.shape)).astype("f4") + 280.0
    data = xr.Dataset({"t2m": (("time", "lat", "lon"), fields, {"units": "K"})}, {"time": times, **axes})
    data.to_netcdf(tmp_path / "truth.nc")
    for count in (4, 64):
        inits = data.isel(time=range(count)).rename(time="init_time")
        inits.expand_dims(lead_time=[np.timedelta64(6, "h")]).to_netcdf(tmp_path / f"{count}.nc")
        forecasts = Forecasts(str(tmp_path / f"{count}.nc"))
        truth = Truth([str(tmp_path / "truth.nc")], forecasts)
        tracemalloc.start()
        verify(forecasts, truth)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    more = 60 * 4 * grid.nlat * grid.nlon  # bytes of the fields scored beyond the first 4
    assert peaks[1] - peaks[0] < more / 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.nc", "truth.nc"], "absent.nc: no such file"),
        (["truth.nc", "truth.nc"], "truth.nc: a forecast needs two of init_time, lead_time and time"),
        (["f.nc", "truth.nc", "--variables", "q"], "f.nc: has no forecast of q; it holds t2m, z500"),
        (["f.nc", "truth.nc", "--climatology", "always"], "a period reads like 1982:1989, and there is no file"),
        (["f.nc", "truth.nc", "--climatology", "1982:1989"], "no time of truth.nc lies in it; it runs 2020-01-01"),
        (["f.nc", "truth.nc", "--climatology", "truth.nc"], "a climatology has a dim month, or dayofyear (and hour)"),
        (["f.nc", "truth.nc", "--output", "f.nc"], "f.nc: is a file that is scored"),
        (["f.nc", "truth.nc", "--report", "nowhere/s.html"], "its folder does not exist"),
        (["text.nc", "truth.nc"], "text.nc: not netCDF, HDF5 or zarr"),
    ],
)
def test_commands_that_cannot_be_done_end_with_one_line(scored, tmp_path, arguments, words):
    for name in ("f.nc", "truth.nc"):
        os.link(scored / name, tmp_path / name)
    (tmp_path / "text.nc").write_text("scores")
    done = sfno_dist(tmp_path, "score", *arguments)
    assert done.returncode == 1 and words in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in done.stderr and not list(tmp_path.glob("*s.*"))


def test_one_field_alone_is_scored_too(tmp_path):
    """A single initial time, lead and variable, without climatology: the page and table have no empty places."""
    truth = truth_file(tmp_path)
    forecast_of(truth, [5], 1).isel(lead_time=[1]).to_netcdf(tmp_path / "f.nc")
    table = score(str(tmp_path / "f.nc"), [str(truth)], variables=["z500"], report=str(tmp_path / "s.html"))
    assert table.splitlines()[2].split()[:5] == ["z500", "m**2", "s**-2", "6", "h"]
    assert "note: no climatology" in table and (tmp_path / "s.html").read_text().count("<img ") == 3
