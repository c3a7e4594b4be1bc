"""Triton kernels, one per file, and the custom operators they are called through."""
