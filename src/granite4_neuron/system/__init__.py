"""Memory, files and the terminal, as the operating system has them."""
