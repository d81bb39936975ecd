"""A hostile afternoon: every public surface in turns until time is up, `python -m tests.soak --minutes 60`."""
