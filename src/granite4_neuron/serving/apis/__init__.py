"""The APIs: bodies of requests, and answers."""
