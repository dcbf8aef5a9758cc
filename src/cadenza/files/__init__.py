"""Local files: regular files only, flushed and replaced whole; folders for one process alone."""
