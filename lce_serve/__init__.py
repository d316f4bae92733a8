"""The HTTP server of `lce serve`: the APIs of OpenAI and Anthropic over one `lce.Batch`. Needs `lce[serve]`."""
