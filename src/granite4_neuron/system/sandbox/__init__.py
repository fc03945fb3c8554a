"""Processes with limits on time and memory for work on untrusted input."""
