"""Damaged, missing, changed and contended files are named; handles are few, and never shared."""

import errno
import os
import pickle
import resource
import subprocess
import sys
import threading

import netCDF4
import numpy as np
import pytest
import torch
import xarray as xr
from atmosphere import GRID, assert_right, atmosphere, make, write

from sfno_dist.data import DataError, open_dataset
from sfno_dist.data.handles import open_files

FORMATS = ["netcdf4", "netcdf3", "zarr2", "zarr3"]


def zarr_of(data, path, *, version=2, chunks=(1, 13, 12), fill=np.nan, **options):
    data.t.encoding = {"chunks": chunks, **options}
    if version == 2:
        data.t.encoding["_FillValue"] = fill
    data.to_zarr(path, zarr_format=version, consolidated=False)
    return path


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("fill", [np.nan, 0.0])
def test_missing_zarr_chunks_are_named(version, fill, tmp_path):
    path = zarr_of(make(), tmp_path / "a.zarr", version=version, fill=fill)
    chunk = path / "t" / ("4.0.1" if version == 2 else "c/4/0/1")
    chunk.unlink()
    data = open_dataset(path)
    assert np.isfinite(data.t[:4].values).all() and np.isfinite(data.t[4, :, :12].values).all()
    with pytest.raises(DataError, match=r"a\.zarr: chunk t/.*4.0.1 does not exist"):
        data.t[4].load()
    allowed = open_dataset(path, ["t"], missing=["t"]).t.values
    assert np.isnan(allowed[4, :, 12:]).all() and np.isnan(allowed).sum() == 13 * 12


def test_missing_chunks_within_a_shard_are_named(tmp_path):
    data = make()
    data.t[4, :, 12:] = 0.0  # left out by zarr: all are the fill value
    path = zarr_of(data, tmp_path / "a.zarr", version=3, chunks=(1, 13, 12), shards=(6, 13, 24), fill_value=0.0)
    opened = open_dataset(path)
    assert np.isfinite(opened.t[:4].values).all()
    with pytest.raises(DataError, match=r"chunk t/c/0/0/0\[4,0,1\] does not exist"):
        opened.t[3:5].load()
    assert np.isnan(open_dataset(path, ["t"], missing="t").t[4].values).sum() == 13 * 12


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("packed", [False, True])
def test_zarr_chunks_cut_off_are_named(version, share, packed, tmp_path):
    none = {"compressor": None} if version == 2 else {"compressors": ()}
    path = zarr_of(make(), tmp_path / "a.zarr", version=version, **({} if packed else none))
    chunk = path / "t" / ("4.0.1" if version == 2 else "c/4/0/1")
    chunk.write_bytes(chunk.read_bytes()[: int(share * chunk.stat().st_size)])
    with pytest.raises(DataError, match=r"a\.zarr: t cannot be read"):
        open_dataset(path).load()


def test_zeros_are_values_in_zarr_whose_fill_is_zero(tmp_path):
    data = make() - make() + xr.where(make().longitude > 100, 1.0, 0.0).astype("f4")
    zarr_of(data, tmp_path / "a.zarr", fill=0.0)
    assert float(open_dataset(tmp_path / "a.zarr").t.min()) == 0.0


@pytest.mark.parametrize("dtype", ["i2", "i4", "u2", "f4", "f8"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_was_never_written_is_no_value(dtype, packed, tmp_path):
    template = write(make(), tmp_path, "template")
    with xr.open_dataset(template, decode_times=False) as data, netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        for name, size in data.sizes.items():
            file.createDimension(name, size)
            file.createVariable(name, "f8", (name,))[:] = data[name].values
            file[name].units = data[name].attrs["units"]
        stored = file.createVariable("t", dtype, ("time", "latitude", "longitude"))
        if packed:
            stored.scale_factor, stored.add_offset = 0.01, 270.0
        stored[:5] = 280.0
    if dtype[0] in "iu" and not packed:
        pytest.skip("integers without scale, such as categories, may take any value")
    data = open_dataset(tmp_path / "a.nc")
    assert np.isfinite(data.t[:5].values).all()
    with pytest.raises(DataError, match=r"a\.nc: t has 312 of 312 values (NaN|never written)"):
        data.t[5].load()
    assert np.isnan(open_dataset(tmp_path / "a.nc", ["t"], missing=["t"]).t[5].values).all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "codes", [{"_FillValue": -32767}, {"missing_value": -32766}, {"_FillValue": -32767, "missing_value": -32766}]
)
def test_both_codes_of_missing_values_are_missing(kind, codes, tmp_path):
    packed = np.round((make().t.values - 270) / 0.01).astype("i2")
    for n, code in enumerate(codes.values()):
        packed[2, 3, n] = code
    data = make()
    attributes = {"units": "K", "scale_factor": 0.01, "add_offset": 270.0, **{k: np.int16(v) for k, v in codes.items()}}
    if "zarr" in kind and "_FillValue" in codes:
        attributes.pop("_FillValue")
    raw = data.assign(t=(data.t.dims, packed, attributes))
    if "zarr" in kind and "_FillValue" in codes:
        raw.t.encoding["_FillValue"] = np.int16(-32767)
    path = write(raw, tmp_path, kind=kind)
    with pytest.raises(
        DataError, match=rf"t has {len(codes)} of 1872 values NaN at time 2019-12-30T12.*option 'missing'"
    ):
        open_dataset(path).t.load()
    values = open_dataset(path, ["t"], missing=["t"]).t.values
    assert np.isnan(values[2, 3, : len(codes)]).all() and np.isnan(values).sum() == len(codes)
    expected = atmosphere("t", data.time.values, GRID.latitudes_degrees, GRID.longitudes_degrees)
    assert np.nanmax(np.abs(values - expected)) < 0.0051


@pytest.mark.parametrize("code", [1e20, 1e30, -1e34, 9.96921e36])
def test_fill_codes_that_are_not_declared_are_named(code, tmp_path):
    data = make()
    data.t[0, 0, 0] = code
    with pytest.raises(DataError, match=r"never written|a fill code that the file does not declare"):
        open_dataset(write(data, tmp_path)).load()


def test_the_option_names_variables_that_are_read(tmp_path):
    path = write(make(), tmp_path)
    with pytest.raises(DataError, match="'missing' names sst, not among the variables t"):
        open_dataset(path, ["t"], missing=["sst"])
    data = make()
    data.t[0, 0, 0] = np.inf
    with pytest.raises(DataError, match="infinite"):
        open_dataset(write(data, tmp_path, "b"), ["t"], missing=["t"]).load()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_changed_or_vanished_is_named(kind, tmp_path):
    path = write(make(), tmp_path, kind=kind)
    data = open_dataset(path)
    data.t[0].values  # noqa: B018
    other = write(make(first=1), tmp_path, "new", kind)
    os.rename(path, tmp_path / "old")
    with pytest.raises(DataError, match="it is gone"):
        data.t[1].load()
    os.rename(other, path)
    with pytest.raises(DataError, match="has changed since it was opened"):
        data.t[1].load()
    assert_right(open_dataset(path))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError("NetCDF: HDF error")])
def test_a_disk_error_while_reading_is_named(error, tmp_path, monkeypatch):
    data = open_dataset(write(make(), tmp_path))

    def fails(*_, **__):
        raise error

    monkeypatch.setattr("sfno_dist.data.stored.StoredArray.read", fails)
    with pytest.raises(DataError, match=r"a\.nc: t cannot be read"):
        data.t[1].load()


def test_paths_that_lead_nowhere_are_named(tmp_path, monkeypatch):
    (tmp_path / "link.nc").symlink_to(tmp_path / "gone.nc")
    with pytest.raises(DataError, match=r"link\.nc: a link to .*gone\.nc, which does not exist"):
        open_dataset(tmp_path / "link.nc")
    write(make(), tmp_path, "a")
    with pytest.raises(DataError, match=r"no zarr group .*name .*\*\.nc"):
        open_dataset(tmp_path)
    with pytest.raises(DataError, match="remote stores"):
        open_dataset("gs://bucket/era5.zarr")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_right(open_dataset("~/a.nc"))
    assert_right(open_dataset([tmp_path / "a.nc", tmp_path / "*.nc"][:1]))
    write(make(), tmp_path, "t[1]")
    assert_right(open_dataset(tmp_path / "t[1].nc"))  # a name, though it could be read as a pattern


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_permission_denied_is_named(tmp_path):
    path = write(make(), tmp_path)
    path.chmod(0)
    with pytest.raises(DataError, match="permission denied"):
        open_dataset(path)


def test_a_file_that_is_being_written_is_named(tmp_path):
    path = write(make(), tmp_path)
    hold = "import netCDF4, sys; d = netCDF4.Dataset(sys.argv[1], 'a'); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hold, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"held\n"
        with pytest.raises(DataError, match="HDF5_USE_FILE_LOCKING=FALSE"):
            open_dataset(path)
        writer.stdin.close()


def test_many_files_keep_within_the_limit_of_open_ones(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for n in range(100):
        data = make(first=n, steps=1)
        data.to_netcdf(tmp_path / f"{n:03d}.nc")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 75, hard))
    try:
        data = open_dataset(tmp_path / "*.nc")
        assert_right(data)
        assert len(open_files._opened) <= open_files.limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", FORMATS)
def test_forked_and_pickled_readers_and_threads_read_the_same(kind, tmp_path):
    data = open_dataset(write(make(steps=24), tmp_path, kind=kind))
    expected = data.t.copy().values
    copy = pickle.loads(pickle.dumps(data))
    np.testing.assert_array_equal(copy.t.values, expected)

    class Times(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, item):
            return data.t[item].values

    forked = torch.utils.data.DataLoader(Times(), num_workers=2, multiprocessing_context="fork", timeout=60)
    for _ in range(2):
        np.testing.assert_array_equal(np.concatenate(list(forked)), expected)
    results = [None] * 8

    def work(n):
        results[n] = np.stack([data.t[i].values for i in range(24)])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        np.testing.assert_array_equal(result, expected)


def test_opening_reads_no_fields(tmp_path, monkeypatch):
    for n in range(3):
        write(make(first=6 * n), tmp_path, str(n))

    def fails(*_, **__):
        raise AssertionError("a field was read")

    monkeypatch.setattr("sfno_dist.data.stored.StoredArray.read", fails)
    assert open_dataset(tmp_path / "*.nc").sizes["time"] == 18


def test_the_last_reader_gone_never_waits_for_another_thread(tmp_path):
    """Garbage is collected in any thread, also in one that the lock's owner waits for."""
    path = str(write(make(), tmp_path))
    with open_files.opened(path):
        thread = threading.Thread(target=open_files.close, args=(path,), daemon=True)
        thread.start()
        thread.join(timeout=20)
        assert not thread.is_alive()
    open_files.close(path)
    write(make(), tmp_path)  # HDF5 refuses while a handle is open


def test_a_pipe_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.nc")
    with pytest.raises(DataError, match=r"a\.nc: a pipe, socket or device"):
        open_dataset(tmp_path / "a.nc")


def test_patterns_in_folders_with_brackets(tmp_path):
    (tmp_path / "era[5] (new)").mkdir()
    write(make(), tmp_path / "era[5] (new)")
    assert_right(open_dataset(tmp_path / "era[5] (new)" / "*.nc"))


@pytest.mark.parametrize("kind", ["zarr2", "zarr3"])
def test_an_array_of_a_zarr_leads_to_its_group(kind, tmp_path):
    path = write(make(), tmp_path, kind=kind)
    with pytest.raises(DataError, match=r"a single zarr array; name the zarr group that holds it, .*a\.zarr$"):
        open_dataset(path / "t")


@pytest.mark.parametrize(
    ("fill", "whole"), [(None, False), (0.0, False), (None, True)], ids=["no fill", "fill that is a value", "one piece"]
)
def test_hdf5_never_written_is_no_value(fill, whole, tmp_path):
    """h5py's arrays read as zeros there, those of netCDF without fill as what memory held."""
    h5py = pytest.importorskip("h5py")
    data = make()
    with h5py.File(tmp_path / "a.nc", "w") as file:
        axes = {"time": 6.0 * np.arange(6), "lat": GRID.latitudes_degrees, "lon": GRID.longitudes_degrees}
        units = {"time": "hours since 2019-12-30", "lat": "degrees_north", "lon": "degrees_east"}
        field = file.create_dataset("t", (6, 13, 24), "f4", chunks=None if whole else (2, 13, 12), fillvalue=fill)
        for place, (name, axis) in enumerate(axes.items()):
            file[name] = axis
            file[name].attrs["units"] = units[name]
            file[name].make_scale(name)
            field.dims[place].attach_scale(file[name])
        if not whole:
            field[:4], field[4:, :, :12] = data.t[:4], data.t[4:, :, :12]
    opened = open_dataset(tmp_path / "a.nc", ["t"])
    name = r"0\.0\.0" if whole else r"2\.0\.1"
    with pytest.raises(DataError, match=rf"a\.nc: chunk t/{name} was never written"):
        opened.t[4].load()
    allowed = open_dataset(tmp_path / "a.nc", ["t"], missing=["t"])
    assert np.isnan(allowed.t[4:, :, 12:]).all() and np.isnan(allowed.t).sum() == (1872 if whole else 2 * 13 * 12)
    if not whole:
        assert np.isfinite(opened.t[4, :, :12]).all()
        np.testing.assert_array_equal(opened.t[:4], data.t[:4])


@pytest.mark.parametrize("kind", ["zarr2", "zarr3"])
@pytest.mark.parametrize("name", ["time", "latitude", "longitude"])
def test_coordinates_never_written_are_named(kind, name, tmp_path):
    path = write(make(), tmp_path, kind=kind)
    (path / name / ("0" if kind == "zarr2" else "c/0")).unlink()
    with pytest.raises(DataError, match=rf"a\.zarr: chunk {name}/.*0 does not exist"):
        open_dataset(path)
    lone = make().isel(time=[0])  # whose time is 0, the fill value, and its chunk left out
    lone.time.encoding["units"] = "hours since 2019-12-30"
    assert_right(open_dataset(write(lone, tmp_path, "lone", kind)))


@pytest.mark.parametrize("kind", ["netcdf4", "zarr2"])
def test_codes_and_packing_written_as_text_count_as_numbers(kind, tmp_path):
    data = make()
    data.t[2, 3, 4] = -999.0
    data.t.attrs["missing_value"] = "-999."
    with pytest.raises(DataError, match=r"t has 1 of 1872 values NaN at time 2019-12-30T12"):
        open_dataset(write(data, tmp_path, kind=kind)).load()
    packed = np.round((make().t.values - 270) / 0.01).astype("i2")
    attributes = {"units": "K", "scale_factor": "0.01", "add_offset": "270."}
    raw = make().assign(t=(data.t.dims, packed, attributes))
    assert_right(open_dataset(write(raw, tmp_path, "packed", kind)), atol=0.0051)


@pytest.mark.parametrize("code", [-999.0, -9999.0, 9999.0, -32767.0])
def test_fill_codes_among_values_of_a_known_variable_are_named(code, tmp_path):
    """As a value of a variable whose range is not known it may be right."""
    data = make()
    data.t[2, 3, 4] = code
    with pytest.raises(DataError, match=rf"a\.nc: t has values .*: {code:g} is a fill code that the file does not"):
        open_dataset(write(data, tmp_path)).load()
    other = open_dataset(write(data.rename(t="index"), tmp_path, "b")).load()
    assert other.index[2, 3, 4] == code
