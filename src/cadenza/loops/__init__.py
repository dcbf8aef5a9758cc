"""Loops of the user's own around the engine, and how every run begins and ends."""
