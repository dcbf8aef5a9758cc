"""Callbacks of Keras."""
