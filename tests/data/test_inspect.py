"""``sfno-dist inspect`` and ``rechunk``: what they print, and that the remedy cures."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from sfno_dist import Grid, ProcessMesh, cli
from sfno_dist.data import DataError, open_dataset
from sfno_dist.data.inspect import amplification, report, tile_reads
from sfno_dist.data.open import dataset_of, open_sources
from sfno_dist.data.rechunk import rechunk

GRID = Grid("equiangular", 19, 36)


def packed(path: Path, steps: list[int], **encoding) -> xr.Dataset:
    """South to north, int16, on levels, times ``steps`` x 6 h since 2020."""
    times = np.datetime64("2020-01-01", "ns") + np.array(steps) * np.timedelta64(6, "h")
    lat, lon = GRID.latitudes_degrees[::-1], GRID.longitudes_degrees
    hours = np.array(steps)[:, None, None, None]
    values = 250 + hours + np.array([0.0, 9.0])[None, :, None, None] + 20 * np.cos(np.radians(lat))[:, None]
    values = values + np.sin(np.radians(lon))
    data = xr.Dataset(
        {"t": (("time", "level", "latitude", "longitude"), values, {"units": "K"})},
        {"time": times, "level": ("level", [500.0, 850.0], {"units": "hPa"}), "latitude": lat, "longitude": lon},
    )
    packing = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 270.0, "_FillValue": -32767}
    data.to_netcdf(path, encoding={"t": packing | encoding})
    return data


def test_report_names_grid_gaps_repeated_times_units_and_chunks(tmp_path: Path) -> None:
    packed(tmp_path / "a.nc", [0, 1, 2, 5, 6], chunksizes=(5, 2, 19, 36))
    packed(tmp_path / "b.nc", [6, 7], chunksizes=(1, 2, 19, 36))
    text = report([str(tmp_path / "*.nc")], ProcessMesh.on_paper(polar=2, azimuth=2))
    for line in (
        r"grid +equiangular 19 x 36; lat 90 to -90, lon 0 to 350 degrees",
        r"times +6, 2020-01-01T00:00:00 to 2020-01-02T18:00:00",
        r"step +6 hours",
        r"gaps +1: 2020-01-01T12:00:00 to 2020-01-02T06:00:00",
        r"repeated +1",
        r"t500 \.\.\. t850 +K +t +int16 +500, 850 +time 5 x level 2 x latitude 19 x longitude 36 +5 x 2 x 19 x 36",
        # int16, two levels: a tile needs 9 x 18 x 2 x 2 bytes of a chunk of 5 x 2 x 19 x 36 x 2, which has both
        r"0 +0:9 +0:18 +648 B +13.36 KiB +21.11",
    ):
        assert re.search(rf"^{line}$", text, re.MULTILINE), f"{line}\n{text}"
    assert " a_polar2_azimuth2.zarr --mesh polar=2,azimuth=2" in text


def test_the_printed_command_mends_what_the_report_finds(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    packed(Path("a.nc"), list(range(8)), chunksizes=(8, 2, 19, 36))
    cli.main(["inspect", "a.nc", "--mesh", "polar=2,azimuth=4"])
    command = shlex.split(capsys.readouterr().out.strip().splitlines()[-1])
    assert command[:2] == ["sfno-dist", "rechunk"]
    cli.main(command[1:])
    before, after = open_dataset("a.nc", ["t500", "t850"]), open_dataset(command[3])
    for name in ("t500", "t850"):
        np.testing.assert_array_equal(before[name].values.view(np.int32), after[name].values.view(np.int32))
        assert after[name].attrs["units"] == "K"
    np.testing.assert_array_equal(before.time.values, after.time.values)
    np.testing.assert_array_equal(before.lat.values, after.lat.values)
    mesh = ProcessMesh.on_paper(polar=2, azimuth=4)
    # 8 times and 8 tiles in a chunk; the two levels in it are read together
    assert amplification(tile_reads(*dataset_of(open_sources("a.nc"), ["t500", "t850"]), mesh)) == 64
    assert amplification(tile_reads(*dataset_of(open_sources(command[3])), mesh)) <= 1.05
    array = zarr.open_group(command[3], mode="r")["t500"]
    assert array.metadata.zarr_format == 3 and array.dtype == np.float32 and np.isnan(array.fill_value)
    assert not {"scale_factor", "add_offset", "_FillValue"} & set(array.attrs)
    capsys.readouterr()
    cli.main(["inspect", command[3], "--mesh", "polar=2,azimuth=4"])
    assert "Chunks fit 2 x 4 processes" in capsys.readouterr().out


def test_missing_values_and_times_that_the_files_declare_missing(tmp_path: Path) -> None:
    data = packed(tmp_path / "a.nc", [0, 1, 2]).isel(level=0).drop_vars("level")
    data["t"][1, 4:6, 7] = np.nan
    data.to_netcdf(tmp_path / "gaps.nc")
    with pytest.raises(DataError, match=r"gaps\.nc.*t .*NaN|missing"):
        rechunk([str(tmp_path / "gaps.nc")], tmp_path / "o.zarr", ProcessMesh.on_paper())
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.nc", "gaps.nc"]
    rechunk([str(tmp_path / "gaps.nc")], tmp_path / "o.zarr", ProcessMesh.on_paper(), missing=["t"])
    before = open_dataset(tmp_path / "gaps.nc", missing=["t"])
    np.testing.assert_array_equal(before.t.values, open_dataset(tmp_path / "o.zarr", missing=["t"]).t.values)


def test_interrupted_rechunk_leaves_nothing_and_an_output_is_never_overwritten(tmp_path: Path, monkeypatch) -> None:
    packed(tmp_path / "a.nc", [0, 1])
    source, output, mesh = [str(tmp_path / "a.nc")], tmp_path / "o.zarr", ProcessMesh.on_paper(polar=2)

    def interrupt(*_, **__) -> None:
        assert any(path.name.startswith(".o.zarr") for path in tmp_path.iterdir())
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(zarr.Array, "__setitem__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rechunk(source, output, mesh)
    assert [path.name for path in tmp_path.iterdir()] == ["a.nc"]
    assert rechunk(source, output, mesh) == (9, 36)
    before = sorted((path, path.stat().st_mtime_ns) for path in output.rglob("*"))
    with pytest.raises(DataError, match="exists already"):
        rechunk(source, output, mesh)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in output.rglob("*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "none.nc"], "no such file"),
        (["inspect", "a.nc", "--mesh", "polar=2;azimuth=2"], "--mesh: a layout reads like polar=2,azimuth=4"),
        (
            ["inspect", "a.nc", "--mesh", "polar=2,polar=3"],
            "a layout reads like polar=2,azimuth=4, got 'polar=2,polar=3'",
        ),
        (["inspect", "a.nc", "--mesh", "polar=0"], "at least 1"),
        (["inspect", "a.nc", "--mesh", "polar=20"], "fewer than the 20 processes"),
        (["inspect", "a.nc", "--variables", "q500"], "no variable q500"),
        (["rechunk", "a.nc", "no/o.zarr"], "does not exist"),
        (["rechunk", "a.nc", "a.nc"], "exists already"),
        (["demo", "o.h5"], "ends in .nc"),
        (["demo", "o.nc", "--nlat", "8"], "too coarse"),
        (["demo", "o.nc", "--days", "0"], "days must be at least 1"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, monkeypatch, capsys, words: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    packed(Path("a.nc"), [0, 1])
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    message = capsys.readouterr().err
    assert ended.value.code == 1 and message.count("\n") == 1 and message.startswith("error: ") and said in message


def test_rechunk_names_what_it_cannot_do(tmp_path):
    from atmosphere import make, write

    levels = xr.DataArray([500.0, 0.5], dims="level", name="level", attrs={"units": "hPa"})
    path = str(write(xr.concat([make(), make()], levels).transpose("time", ...), tmp_path))
    with pytest.raises(DataError, match=r"o\.nc: rechunk writes a zarr folder; .* ends in \.zarr"):
        rechunk(path, tmp_path / "o.nc", ProcessMesh.on_paper())
    with pytest.warns(UserWarning, match=r"a\.nc: t at 0\.5 hPa is left out"):
        rechunk(path, tmp_path / "o.zarr", ProcessMesh.on_paper())
    assert list(open_dataset(tmp_path / "o.zarr")) == ["t500"]
