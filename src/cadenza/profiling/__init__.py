"""Spans, timings and reads on the host: nothing below needs them."""
