"""Weights of checkpoints: found, read, placed, quantized and written."""
