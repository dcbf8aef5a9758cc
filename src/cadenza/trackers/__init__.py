"""Sinks and callbacks for experiment trackers, hyperparameter search and alerts.

`cadenza.sinks` and `cadenza.callbacks` have the public names.
"""
