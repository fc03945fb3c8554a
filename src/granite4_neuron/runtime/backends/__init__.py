"""Declarations of the backends of `runtime/`: names, options, and how they load. Nothing here imports torch."""
