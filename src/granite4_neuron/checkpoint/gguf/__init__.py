"""GGUF files, as llama.cpp's converter writes them: config, weights and tokenizer in one file."""
