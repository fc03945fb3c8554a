"""Runtimes: each runs steps of the model somewhere, as `runtime.interface.Runtime` says."""
