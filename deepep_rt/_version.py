"""The version of this package, in a file without imports: the build reads it, and every module may."""

__version__ = "0.1.0"
