"""The files made after public reports, where they are beside this checkout: the right outcome of each."""

import importlib.util
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from sfno_dist.data import DataError, open_dataset
from sfno_dist.data.accumulated import check_accumulations
from sfno_dist.data.timeline import TimeStep, sequences

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "reports"
REAL = FOLDER.parent / "real"
ALL = json.loads((FOLDER / "cases.json").read_text()) if FOLDER.is_dir() else []
CASES = {case["id"]: case for case in ALL if "opens" in case}
# Opens as an irregular grid with the area that each row stands for, which its report allows too.
IRREGULAR = "15_irregular_latitudes"

needs_reports = pytest.mark.skipif(not FOLDER.is_dir(), reason="shared/data/reports is not beside this checkout")
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="shared/data/real is not beside this checkout")


def truth(name, times, lat, lon):
    spec = importlib.util.spec_from_file_location("truth", FOLDER / "truth.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.truth(name, module.hours(times)[:, None, None], lat[None, :, None], lon[None, None, :])


@needs_reports
@pytest.mark.parametrize("case", CASES)
def test_reported_files(case):
    about = CASES[case]
    paths = sorted(x for x in (FOLDER / case).iterdir() if x.suffix in (".nc", ".zarr", ".h5"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not about["opens"] and case != IRREGULAR:
            with pytest.raises(DataError) as error:
                check_accumulations(open_dataset(paths, about["variables"]).load(), 6.0, str(paths[0]))
            assert "\n" not in str(error.value)
            for words in about["error_mentions"]:
                assert words.lower() in str(error.value).lower()
            return
        data = open_dataset(paths, about["variables"]).load()
    if case == IRREGULAR:
        assert data.attrs["grid"] == "irregular"
    if "ntime" in about:
        assert data.sizes["time"] == about["ntime"]
    assert data.sizes["lon"] == about.get("nlon", data.sizes["lon"])
    times = data.time.values
    step = TimeStep.of(times)
    complete = data.complete.values
    if "samples_one_step" in about:
        pairs = sequences(times, step, 1)
        assert np.sum(complete[pairs].all(axis=1)) == about["samples_one_step"]
    for name in set(about["variables"]) - {"slt"}:
        known = about.get("truth_names", {}).get(name, name)
        expected = truth(known, times, data.lat.values, data.lon.values)
        tolerance = about.get("tolerance", 1e-3 if known[0] != "z" else 0.05)
        np.testing.assert_allclose(data[name].values[complete], expected[complete], atol=tolerance)
        assert np.isfinite(data[name].values[complete]).all()


@needs_real
def test_real_files(recwarn):
    wanted = {
        "era5_members_3deg.nc": (["z500", "t850"], "equiangular", (4, 61, 120), {"member": 1}),
        "ifs_pl_10deg_6h.nc": (["t850", "z500", "u500", "r700"], "equiangular", (8, 19, 36), {}),
        "era5_tl31_19590102T00.nc": (["t500", "z500", "q850"], "legendre-gauss", (1, 32, 64), {}),
        "navy_winds_monthly_2.5deg.nc": (["UWND", "VWND"], "equiangular", (132, 73, 144), {}),
    }
    for file, (names, grid, shape, options) in wanted.items():
        data = open_dataset(REAL / file, names, **options).load()
        assert data.attrs["grid"] == grid and tuple(data.sizes[d] for d in ("time", "lat", "lon")) == shape
        assert all(np.isfinite(data[name].values).all() for name in names)
    assert not [x for x in recwarn if issubclass(x.category, UserWarning)]
    # Geopotential rises towards the equator, where the air is warm: rows lie where their latitudes say.
    data = open_dataset(REAL / "era5_tl31_19590102T00.nc", ["z500", "t500"]).mean("lon").squeeze()
    assert abs(float(data.z500.idxmax())) < 30 and float(data.t500.max() - data.t500.min()) > 20
    with pytest.raises(DataError, match=r"3 ensemble members .*number: 0, 1, 2.*member=0"):
        open_dataset(REAL / "era5_members_3deg.nc", ["z500"])
    with pytest.raises(DataError, match="no member 7"):
        open_dataset(REAL / "era5_members_3deg.nc", ["z500"], member=7)
