"""`sglang`: an adapter to SGLang's server."""
