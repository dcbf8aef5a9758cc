"""The commands that look at runs."""
