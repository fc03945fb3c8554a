"""The state of a sequence between two steps, its sizes, and snapshots of it in memory and in files."""
