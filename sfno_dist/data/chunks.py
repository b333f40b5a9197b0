"""The chunks of a zarr array on a disk: which are there, and what those hold that are one file each.

A chunk that does not exist reads as the fill value, without an error. Common chunks are read and decoded here, in the
thread that asks: zarr hands each to other threads and back, which takes ten times as long as decoding a small one.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numcodecs
import numpy as np

ABSENT = 2**64 - 1  # offset and length of a chunk that a shard does not hold (zarr v3, sharding-indexed)
# Codecs of format 3 whose bytes tell how to decode them.
DECODERS = ("blosc", "gzip", "zstd")


@dataclass(frozen=True)
class ZarrArray:
    """Chunks (those that files hold, and those within a shard) and file names of an array in a zarr store."""

    absent_text: ClassVar[str] = (
        "does not exist, so its values would be a constant; copy the store again, or write it with "
        "write_empty_chunks=True where they are that constant"
    )
    folder: str
    chunks: tuple[int, ...]
    separator: str
    prefix: str
    inner: tuple[int, ...] = ()
    index_at_end: bool = True
    index_bytes: int = 0
    coding: Coding | None = None

    @classmethod
    def of(cls, path: str, array: str) -> ZarrArray | None:
        """None where the description is of a kind not known here: its chunks cannot be told missing."""
        folder = os.path.join(path, array)
        if os.path.exists(os.path.join(folder, "zarr.json")):
            with open(os.path.join(folder, "zarr.json")) as file:
                return cls._version3(folder, json.load(file))
        with open(os.path.join(folder, ".zarray")) as file:
            about = json.load(file)
        separator = about.get("dimension_separator", ".")
        return cls(folder, tuple(about["chunks"]), separator, "", coding=Coding.version2(about))

    @classmethod
    def _version3(cls, folder: str, about: dict) -> ZarrArray | None:
        if about["chunk_grid"]["name"] != "regular":
            return None
        chunks = tuple(about["chunk_grid"]["configuration"]["chunk_shape"])
        encoding = about["chunk_key_encoding"]
        default = encoding["name"] == "default"
        separator = encoding.get("configuration", {}).get("separator", "/" if default else ".")
        inner: tuple[int, ...] = ()
        at_end, size = True, 0
        for codec in about["codecs"]:
            if codec["name"] == "sharding_indexed":
                inner = tuple(codec["configuration"]["chunk_shape"])
                at_end = codec["configuration"].get("index_location", "end") == "end"
                checksum = any(x["name"] == "crc32c" for x in codec["configuration"]["index_codecs"])
                count = math.prod(a // b for a, b in zip(chunks, inner, strict=True))
                size = 16 * count + 4 * checksum
        prefix = f"c{separator}" if default else ""
        return cls(folder, chunks, separator, prefix, inner, at_end, size, Coding.version3(about))

    def read(self, selection: tuple[slice, ...], missing: list) -> np.ndarray:
        """The values of a selection of step 1, where ``coding`` is known; chunks that lack go into ``missing``.

        What it gives there is undefined; ``missing`` takes the same pairs as ``absent`` returns.
        """
        assert self.coding is not None
        values = np.empty([part.stop - part.start for part in selection], self.coding.dtype)
        for name, box in self._touched_chunks(selection):
            try:
                with open(os.path.join(self.folder, name), "rb", buffering=0) as file:
                    encoded = file.read()
            except FileNotFoundError:
                missing.append((name, box))
                continue
            try:
                chunk = self.coding.decode(encoded).reshape(self.chunks, order=self.coding.order)
            except Exception as error:  # codecs raise errors of many types
                raise ValueError(f"chunk {name}: {error}") from error
            values[inside(box, selection)] = chunk[inside(selection, box)]
        return values

    def absent(self, selection: tuple[slice, ...]) -> list[tuple[str, tuple[slice, ...]]]:
        """(name, part of the array) of each chunk that a selection of step 1 touches and the store lacks."""
        found = []
        for name, box in self._touched_chunks(selection):
            file = os.path.join(self.folder, name)
            if not os.path.exists(file):
                found.append((name, box))
            elif self.inner:
                found += self._absent_within(file, name, box, selection)
        return found

    def _touched_chunks(self, selection: tuple[slice, ...]) -> Iterator[tuple[str, tuple[slice, ...]]]:
        for index in itertools.product(
            *(touched(part, size) for part, size in zip(selection, self.chunks, strict=True))
        ):
            name = self.prefix + self.separator.join(map(str, index)) if index else self.prefix.rstrip("/.") or "0"
            yield name, tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, self.chunks, strict=True))

    def _absent_within(
        self, file: str, name: str, box: tuple[slice, ...], selection: tuple[slice, ...]
    ) -> list[tuple[str, tuple[slice, ...]]]:
        with open(file, "rb") as shard:
            if self.index_at_end:
                shard.seek(max(0, os.path.getsize(file) - self.index_bytes))
            index = shard.read(self.index_bytes)
        counts = [a // b for a, b in zip(self.chunks, self.inner, strict=True)]
        if len(index) < self.index_bytes:
            raise EOFError(f"shard {name} is cut off")
        within = [
            slice(max(part.start, whole.start) - whole.start, min(part.stop, whole.stop) - whole.start)
            for part, whole in zip(selection, box, strict=True)
        ]
        found = []
        for place in itertools.product(*(touched(part, size) for part, size in zip(within, self.inner, strict=True))):
            flat = 0
            for position, count in zip(place, counts, strict=True):
                flat = flat * count + position
            if struct.unpack_from("<QQ", index, 16 * flat) == (ABSENT, ABSENT):
                starts = [whole.start + i * n for whole, i, n in zip(box, place, self.inner, strict=True)]
                part = tuple(slice(a, a + n) for a, n in zip(starts, self.inner, strict=True))
                found.append((f"{name}[{','.join(map(str, place))}]", part))
        return found


@dataclass(frozen=True)
class Coding:
    """How the numbers of a chunk became the bytes of its file: ``codec`` compressed them, all in ``order`` C or F."""

    dtype: np.dtype
    codec: Any = None
    order: Literal["C", "F"] = "C"

    @classmethod
    def version2(cls, about: dict) -> Coding | None:
        """None for codings that are left to zarr."""
        dtype = about["dtype"]
        if about.get("filters") or not isinstance(dtype, str) or np.dtype(dtype).kind not in "iufb":
            return None
        compressor = about.get("compressor")
        try:
            codec = numcodecs.get_codec(compressor) if compressor else None
        except ValueError:
            return None
        return cls(np.dtype(dtype), codec, about.get("order", "C"))

    @classmethod
    def version3(cls, about: dict) -> Coding | None:
        """None for codings that are left to zarr."""
        first, *rest = about["codecs"]
        names = [codec["name"] for codec in rest]
        kind = about["data_type"]
        if first["name"] != "bytes" or len(names) > 1 or not set(names) <= set(DECODERS):
            return None
        if not isinstance(kind, str) or not re.fullmatch("bool|u?int(8|16|32|64)|float(16|32|64)", kind):
            return None
        order = "big" if first.get("configuration", {}).get("endian") == "big" else "little"
        dtype = np.dtype(kind).newbyteorder(">" if order == "big" else "<")
        return cls(dtype, numcodecs.get_codec({"id": names[0]}) if names else None)

    def decode(self, encoded: bytes) -> np.ndarray:
        """The numbers of a chunk, one after the other."""
        return np.frombuffer(self.codec.decode(encoded) if self.codec else encoded, self.dtype)


def inside(part: tuple[slice, ...], whole: tuple[slice, ...]) -> tuple[slice, ...]:
    """Where ``part`` of an array lies within ``whole``, as far as it does."""
    return tuple(
        slice(max(p.start - w.start, 0), max(min(p.stop, w.stop) - w.start, 0))
        for p, w in zip(part, whole, strict=True)
    )


def touched(part: slice, size: int) -> range:
    """Numbers of the chunks of ``size`` that a part of step 1 of a dim lies in."""
    return range(part.start // size, -(-part.stop // size)) if part.stop > part.start else range(0)
