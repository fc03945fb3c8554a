"""What a step costs on a device: graphs, bounds, memory and predicted latency."""
