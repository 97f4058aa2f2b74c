"""The version of this package. The file imports nothing, because the build reads it too."""

__version__ = "0.1.0"
