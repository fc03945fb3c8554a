"""Traffic on engines without a model: how many replicas it needs, and what answers then take."""
