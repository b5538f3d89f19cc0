from __future__ import annotations


class OpenAIChatCompletionsClient:
    def __init__(self, client):
        self.client = client
