"""Adapters: callbacks of other training systems, beside native ones in one list."""
