"""OpenAI's completions and chats."""
