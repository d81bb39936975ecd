"""Ratios against exact attention, measured here and now: every answer is checked first, and what fails gets no speed.

Part of the package, and not of `benchmarks/` beside it, so that whoever installs avow can measure their own machine.
"""
