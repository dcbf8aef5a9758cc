"""Models."""

from cadenza.compat.absent import advise

advise(__name__)
