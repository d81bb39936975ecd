"""The local page: one server on loopback, one file for each of its pages, no mathematics of its own."""
