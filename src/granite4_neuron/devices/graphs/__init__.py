"""What devices share whose steps are compiled graphs."""
