"""The documents: pages in Markdown, and `docs.site`, which makes a site of them."""
