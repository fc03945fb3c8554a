"""What a sequence is between two steps: its state, the state's sizes, and snapshots of it in memory and in files."""
