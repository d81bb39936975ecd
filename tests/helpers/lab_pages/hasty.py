"""A page whose verdicts have a quarter of a second."""

from __future__ import annotations

from avow.lab.page import Page
from tests.helpers.lab_pages.trial import Tried, preview, verdict

PAGE = Page("hasty", "Hasty", "For tests.", 2, Tried, preview, verdict, seconds=0.25)
