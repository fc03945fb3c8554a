"""Plugins for vLLM, and its rejection sampler with its signatures."""
