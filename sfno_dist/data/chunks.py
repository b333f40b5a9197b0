"""Which chunks of a zarr array on a disk are there: one that is not reads as the fill value, without an error."""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from dataclasses import dataclass

ABSENT = 2**64 - 1  # offset and length of a chunk that a shard does not hold (zarr v3, sharding-indexed)


@dataclass(frozen=True)
class ZarrArray:
    """Chunks (those that files hold, and those within a shard) and file names of an array in a zarr store."""

    folder: str
    chunks: tuple[int, ...]
    separator: str
    prefix: str
    inner: tuple[int, ...] = ()
    index_at_end: bool = True
    index_bytes: int = 0

    @classmethod
    def of(cls, path: str, array: str) -> ZarrArray | None:
        """None where the description is of a kind not known here: its chunks cannot be told missing."""
        folder = os.path.join(path, array)
        if os.path.exists(os.path.join(folder, "zarr.json")):
            with open(os.path.join(folder, "zarr.json")) as file:
                return cls._version3(folder, json.load(file))
        with open(os.path.join(folder, ".zarray")) as file:
            about = json.load(file)
        return cls(folder, tuple(about["chunks"]), about.get("dimension_separator", "."), "")

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
        return cls(folder, chunks, separator, f"c{separator}" if default else "", inner, at_end, size)

    def absent(self, selection: tuple[slice, ...]) -> list[tuple[str, tuple[slice, ...]]]:
        """(name, part of the array) of each chunk that a selection of step 1 touches and the store lacks."""
        found = []
        for index in itertools.product(
            *(_touched(part, size) for part, size in zip(selection, self.chunks, strict=True))
        ):
            name = self.prefix + self.separator.join(map(str, index)) if index else self.prefix.rstrip("/.") or "0"
            box = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, self.chunks, strict=True))
            file = os.path.join(self.folder, name)
            if not os.path.exists(file):
                found.append((name, box))
            elif self.inner:
                found += self._absent_within(file, name, box, selection)
        return found

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
        for place in itertools.product(*(_touched(part, size) for part, size in zip(within, self.inner, strict=True))):
            flat = 0
            for position, count in zip(place, counts, strict=True):
                flat = flat * count + position
            if struct.unpack_from("<QQ", index, 16 * flat) == (ABSENT, ABSENT):
                starts = [whole.start + i * n for whole, i, n in zip(box, place, self.inner, strict=True)]
                part = tuple(slice(a, a + n) for a, n in zip(starts, self.inner, strict=True))
                found.append((f"{name}[{','.join(map(str, place))}]", part))
        return found


def _touched(part: slice, size: int) -> range:
    return range(part.start // size, -(-part.stop // size)) if part.stop > part.start else range(0)
