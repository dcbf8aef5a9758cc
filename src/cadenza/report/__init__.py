"""A run as a page: ``cadenza report RUN [RUN...]``, and what notebooks show of a run."""

from cadenza.report.page import page
from cadenza.report.small import small
from cadenza.report.story import Story, story_at, story_of, told_apart

__all__ = ["Story", "page", "small", "story_at", "story_of", "told_apart"]
