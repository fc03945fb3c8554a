"""Prefix caches: states of earlier texts, for texts that begin alike."""
