"""Checkpoints: what they hold, where they lie, and how a run continues from one."""
