"""The model's layers: weights under Hugging Face's names, forward passes made of the functions in ops."""
