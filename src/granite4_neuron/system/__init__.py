"""The operating system's memory, files, signals and terminal."""
