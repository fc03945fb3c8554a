"""A server with OpenAI's and Anthropic's APIs over one engine."""
