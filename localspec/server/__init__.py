"""`localspec serve`: an OpenAI-compatible HTTP server around one engine (extra `serve`)."""
