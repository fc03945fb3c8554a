"""Measurements of a model's accuracy: against transformers, and on a text."""
