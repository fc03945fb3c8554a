"""What the backends of `runtime/` are called, which options they have and how they load. Nothing here imports torch."""
