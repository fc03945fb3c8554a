"""What a person can ask for: a module for each command, with its parser and what it does."""
