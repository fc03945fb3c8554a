"""The commands: a module for each, with its parser and its work."""
