"""A run as an HTML page: ``cadenza report RUN [RUN...]``, and the view of a run in a notebook."""

from cadenza.report.inline_view import small
from cadenza.report.page import Live, page
from cadenza.report.story import Story, name_distinctly, story_at, story_of

__all__ = ["Live", "Story", "name_distinctly", "page", "small", "story_at", "story_of"]
