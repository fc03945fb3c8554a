"""Traffic on engines without a model: the number of replicas it needs, and the latency of its answers."""
