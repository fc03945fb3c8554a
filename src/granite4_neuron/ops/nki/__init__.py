"""The operators as kernels for NeuronCores, in NKI, each beside a torch definition of the same signature.

Its modules import `nki`, which comes with the Neuron SDK; nothing else in the package does.
"""
