"""Guests: callbacks written for other training systems, beside native ones in one list."""
