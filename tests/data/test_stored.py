"""What is decoded from a file is what xarray decodes."""

from pathlib import Path

import netCDF4
import numcodecs
import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

from sfno_dist import Grid
from sfno_dist.data import DataError, open_dataset

GRID = Grid("equiangular", 7, 12)
PACKED = {"scale_factor": 0.25, "add_offset": 280.0}
# (type in the file, attributes, codes of missing values among the numbers)
STORED = {
    "plain": ("f4", {}, []),
    "double": ("f8", {"_FillValue": -999.0}, [-999.0]),
    "two codes": ("f4", {"_FillValue": np.float32(1e20), "missing_value": np.float32(-1.0)}, [1e20, -1.0]),
    "packed": ("i2", PACKED | {"_FillValue": np.int16(-32767)}, [-32767]),
    "packed, two codes": ("i2", PACKED | {"_FillValue": np.int16(-9), "missing_value": np.int16(-8)}, [-9, -8]),
    "packed in bytes": ("i1", {"scale_factor": 0.5, "add_offset": 290.0, "_FillValue": np.int8(-1)}, [-1]),
    "bytes without sign": ("i1", PACKED | {"_Unsigned": "true", "_FillValue": np.int8(-1)}, [-1]),
    "offset alone": ("i2", {"add_offset": 273.0}, []),
    "scale in single precision": ("i4", {"scale_factor": np.float32(0.01), "add_offset": np.float32(270.0)}, []),
    "unsigned type": ("u2", PACKED | {"_FillValue": np.uint16(65535)}, [65535]),
    "whole numbers": ("i4", {"_FillValue": -5}, [-5]),
}


@pytest.mark.parametrize("name", STORED)
def test_values_are_those_that_xarray_decodes(name, tmp_path):
    kind, attributes, codes = STORED[name]
    rng = np.random.default_rng(0)
    values = rng.integers(0, 100, (3, *GRID.shape)).astype(kind)
    for place, code in enumerate(codes):
        values[1, place, 3 + place] = code
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        for dim, axis in (("time", np.arange(3.0)), ("lat", GRID.latitudes_degrees), ("lon", GRID.longitudes_degrees)):
            file.createDimension(dim, len(axis))
            file.createVariable(dim, "f8", (dim,))[:] = axis
        file["time"].units, file["lat"].units, file["lon"].units = (
            "hours since 2000-01-01",
            "degrees_north",
            "degrees_east",
        )
        field = file.createVariable("a", kind, ("time", "lat", "lon"), fill_value=attributes.get("_FillValue"))
        field.set_auto_maskandscale(False)
        field.setncatts({key: value for key, value in attributes.items() if key != "_FillValue"})
        field[:] = values
    xr.open_dataset(tmp_path / "a.nc", mask_and_scale=False).to_zarr(tmp_path / "a.zarr", consolidated=False)
    for path in (tmp_path / "a.nc", tmp_path / "a.zarr"):
        expected = xr.open_dataset(path, **({"consolidated": False} if path.suffix == ".zarr" else {}))["a"].values
        assert np.isnan(expected).sum() == len(codes)
        got = open_dataset(path, ["a"], missing=["a"])["a"].values
        np.testing.assert_array_equal(got, expected.astype(np.float32))


CODINGS = {
    "format 2, blosc": {"zarr_format": 2, "compressors": numcodecs.Blosc("lz4", shuffle=1)},
    "format 2, zlib": {"zarr_format": 2, "compressors": numcodecs.Zlib()},
    "format 2, not compressed": {"zarr_format": 2, "compressors": None},
    "format 2, first index fastest": {"zarr_format": 2, "order": "F"},
    "format 2, big end first": {"zarr_format": 2, "dtype": ">f4"},
    "format 2, filter": {"zarr_format": 2, "filters": [numcodecs.Delta("<f4")]},
    "format 2, folders": {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "format 3": {"zarr_format": 3},
    "format 3, blosc": {"zarr_format": 3, "compressors": BloscCodec(cname="zstd")},
    "format 3, gzip": {"zarr_format": 3, "compressors": GzipCodec()},
    "format 3, not compressed": {"zarr_format": 3, "compressors": None},
    "format 3, checksum": {"zarr_format": 3, "compressors": [ZstdCodec(), Crc32cCodec()]},
    "format 3, transposed": {"zarr_format": 3, "filters": TransposeCodec(order=(2, 0, 1))},
    "format 3, big end first": {"zarr_format": 3, "serializer": BytesCodec(endian="big")},
    "format 3, names of format 2": {"zarr_format": 3, "chunk_key_encoding": {"name": "v2", "separator": "."}},
    "format 3, shards": {"zarr_format": 3, "shards": (2, 8, 20)},
}


def store(folder: Path, **how) -> Path:
    """Three times of noise, in chunks that fit neither the array nor tiles."""
    path = folder / "a.zarr"
    values = np.random.default_rng(0).standard_normal((3, *GRID.shape)).astype("f4")
    group = zarr.open_group(path, mode="w", zarr_format=how["zarr_format"])
    how = {"shape": values.shape, "dtype": "f4", "chunks": (2, 4, 5), **how}
    how.pop("zarr_format")
    axes = {"time": np.arange(3.0), "lat": GRID.latitudes_degrees, "lon": GRID.longitudes_degrees}
    for name, dims, data, options in (
        *((dim, (dim,), axis, {"shape": axis.shape, "dtype": "f8"}) for dim, axis in axes.items()),
        ("a", tuple(axes), values, how),
    ):
        third = group.metadata.zarr_format == 3
        array = group.create_array(name, **options, **({"dimension_names": dims} if third else {}))
        array[:] = data
        units = {"time": "hours since 2000-01-01", "lat": "degrees_north", "lon": "degrees_east"}
        array.attrs.update({"units": units.get(name, "K")} | ({} if third else {"_ARRAY_DIMENSIONS": list(dims)}))
    return path


@pytest.mark.parametrize("name", CODINGS)
def test_chunks_of_zarr_are_decoded_as_zarr_does(name, tmp_path):
    path = store(tmp_path, **CODINGS[name])
    expected = zarr.open_group(path, mode="r")["a"]
    field = open_dataset(path, ["a"])["a"]
    for part in (np.s_[:], np.s_[1:, 3:6, 4:11], np.s_[2, 6:, :1], np.s_[[0, 2], 2:, :]):
        np.testing.assert_array_equal(field[part].values, np.asarray(expected[:])[part])


@pytest.mark.parametrize("name", ["format 2, blosc", "format 3", "format 3, not compressed", "format 3, shards"])
@pytest.mark.parametrize("damage", ["cut off", "scrambled", "empty"])
def test_a_damaged_chunk_is_named(name, damage, tmp_path):
    path = store(tmp_path, **CODINGS[name])
    field = open_dataset(path, ["a"])["a"]
    chunk = max((x for x in (path / "a").rglob("*") if x.is_file() and "json" not in x.name), key=str)
    whole = chunk.read_bytes()
    if damage == "scrambled" and "not compressed" in name:
        pytest.skip("any bytes are numbers")
    damaged = {"cut off": whole[: len(whole) // 2], "scrambled": whole[::-1], "empty": b""}
    chunk.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"a\.zarr: a cannot be read \(.*damaged, copy it again"):
        field.load()
