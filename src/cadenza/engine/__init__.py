"""The loop, evaluation, and what both stand on."""
