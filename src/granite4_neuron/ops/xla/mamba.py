"""The Mamba-2 recurrence in compiled graphs."""

# Tokens that are scanned at once: the number of partitions that Trainium's engines work on.
CHUNK_SIZE = 128
