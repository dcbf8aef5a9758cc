"""The listings are scripts: they are run as such, and not imported."""

collect_ignore = ["listings"]
