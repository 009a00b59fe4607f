"""KV caches: how keys and values are packed, written and read from outside."""
