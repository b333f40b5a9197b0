"""Data: files in canonical form, statistics, features, and the DataModule."""

from sfno_dist.data.errors import DataError
from sfno_dist.data.open import open_dataset

__all__ = ["DataError", "open_dataset"]
