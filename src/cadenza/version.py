"""The version: here once; the build reads it."""

__version__ = "0.2.0"
