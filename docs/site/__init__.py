"""A static site of the pages and of the docstrings, made offline: `python -m docs.site`."""
