"""A first look at a PyTorch device: what runs on it and is right. See docs/first-device-run.md."""
