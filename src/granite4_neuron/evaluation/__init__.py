"""How good a model's numbers are: beside transformers, and on a text."""
