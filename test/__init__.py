import gc

# What is imported and collected stays until the end, and Python would look through it again and again. `conftest` turns
# this on again before the first test.
gc.disable()
