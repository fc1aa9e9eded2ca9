"""The error of this package."""


class ConversionError(ValueError):
    """A conversion that cannot be made, or whose result is not what went in."""
