"""The HTTP server: routes, connections, logs."""
