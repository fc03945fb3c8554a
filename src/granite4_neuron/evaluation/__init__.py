"""Measures of a model's numbers: against transformers, and on a text."""
