"""Drafters: what proposes tokens that the model verifies together."""
