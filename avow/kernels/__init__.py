"""Triton kernels, loaded at use; each has a pure-torch twin it is tested against."""
