"""GGUF files, as llama.cpp's converter writes them for Granite models: config, weights and tokenizer in one file."""
