"""The length that the header of a classic netCDF file promises.

A truncated one reads without any error, the lost part as zeros: only its length tells. Layout: "The NetCDF Classic
Format Specification" and its 64-bit extensions (CDF-1, CDF-2, CDF-5), docs.unidata.ucar.edu/netcdf-c.
"""

from __future__ import annotations

import math
import struct
from typing import BinaryIO

SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}
STREAMING = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)


class Header:
    """Reads the header of an open file; ``EOFError`` where it ends within."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        magic = self._take(4)
        self.long_counts, self.long_offsets = magic[3] == 5, magic[3] in (2, 5)
        self.records = self._count()

    def length(self) -> int:
        """Bytes of the whole file, without padding after the last value."""
        dims = [self._dim() for _ in range(self._list())]
        self._attributes()
        variables = [self._variable(dims) for _ in range(self._list())]
        ends = [begin + size for begin, size, is_record in variables if not is_record]
        records = [(begin, size) for begin, size, is_record in variables if is_record]
        if records and self.records and self.records not in STREAMING:
            # A lone record variable is not padded to 4 bytes between records.
            stride = records[0][1] if len(records) == 1 else sum(_padded(size) for _, size in records)
            ends += [begin + (self.records - 1) * stride + size for begin, size in records]
        return max(ends, default=self.file.tell())

    def _take(self, count: int) -> bytes:
        taken = self.file.read(count)
        if len(taken) < count:
            raise EOFError("the header is cut off")
        return taken

    def _number(self, long: bool) -> int:
        return struct.unpack(">Q" if long else ">I", self._take(8 if long else 4))[0]

    def _count(self) -> int:
        return self._number(self.long_counts)

    def _list(self) -> int:
        self._number(long=False)  # tag: dimensions, attributes, variables or absent
        return self._count()

    def _name(self) -> None:
        self._take(_padded(self._count()))

    def _dim(self) -> int:
        self._name()
        return self._count()

    def _attributes(self) -> None:
        for _ in range(self._list()):
            self._name()
            size = SIZES.get(self._number(long=False), 1)
            self._take(_padded(self._count() * size))

    def _variable(self, dims: list[int]) -> tuple[int, int, bool]:
        """(offset, bytes, or bytes of one record, whether it has records)."""
        self._name()
        shape = [dims[self._count()] for _ in range(self._count())]
        self._attributes()
        size = SIZES.get(self._number(long=False), 1)
        self._count()  # its size, which overflows for large variables
        begin = self._number(self.long_offsets)
        is_record = bool(shape) and shape[0] == 0
        return begin, math.prod(shape[1:] if is_record else shape) * size, is_record


def _padded(size: int) -> int:
    return -(-size // 4) * 4
