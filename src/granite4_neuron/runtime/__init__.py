"""Runtimes: each runs steps of the model somewhere. They share the interface of `runtime.cpu.CPURuntime`."""
