"""A folder for each device: its kernels, forms of layers, runtime and options. Importing it imports no framework."""
