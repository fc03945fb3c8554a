"""PyTorch's devices: what runs the model through torch.compile on one of them, or on several."""
