"""The operating system's memory, files and terminal."""
