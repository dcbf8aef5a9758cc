"""Sinks that write to trackers of experiments. `cadenza.sinks` has their public names."""
