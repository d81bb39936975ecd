"""Pages that misbehave on request, so that tests see what the lab makes of it."""
