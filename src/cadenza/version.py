"""The version: here once; the build reads it."""

__version__ = "0.1.0"
