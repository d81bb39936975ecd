"""The local page: one server on loopback, one file for each of its pages, no mathematics of its own."""

from avow.extras import require

require("fastapi", "uvicorn", "safetensors", purpose="for the lab", extra="lab")
require("flint", "jinja2", "latex2mathml", "scipy", "sympy", purpose="for the lab's pages", extra="lab")
