"""Custom loops around the engine, and how every run begins and ends."""
