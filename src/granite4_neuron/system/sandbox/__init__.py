"""Processes with limits on time and memory for work on untrusted input, and threads with a budget of processor time."""
