"""The errors of the data room."""


class DataError(ValueError):
    """Data that cannot be used. One line naming file, variable or time, and the remedy."""


class VariableMissingError(DataError):
    """A file does not hold the variable; another one of the list may."""
