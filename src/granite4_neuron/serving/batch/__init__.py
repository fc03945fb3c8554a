"""Answers to files of requests: OpenAI's batches, and plain prompts. No HTTP; the bodies are those of the server."""
