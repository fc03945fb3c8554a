"""A first look at a PyTorch device: which parts run on it and give right numbers. See docs/first-device-run.md."""
