"""Plugins for vLLM, and operators and a rejection sampler with its signatures."""
