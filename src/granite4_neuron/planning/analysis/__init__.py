"""The costs of a step on a device: graphs, bounds, memory and predicted latency."""
