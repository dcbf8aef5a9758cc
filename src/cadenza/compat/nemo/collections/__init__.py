"""``nemo.collections``: none of them is provided."""

from cadenza.compat.absent import advise

advise(__name__)
