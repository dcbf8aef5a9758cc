"""Tests that measure time, send signals or kill: they run last, and nothing runs beside them."""
