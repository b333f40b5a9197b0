"""The one error of the data room."""


class DataError(ValueError):
    """Data that cannot be used. One line naming file, variable or time, and the remedy."""
