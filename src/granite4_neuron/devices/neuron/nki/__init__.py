"""The operators as NKI kernels for NeuronCores, each with a torch definition of the same signature.

Its modules import `nki`, which comes with the Neuron SDK; nothing else in the package does.
"""
