"""Callbacks of Lightning."""
