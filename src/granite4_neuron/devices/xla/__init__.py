"""The device of torch_xla."""
