"""How keys and values are packed in KV caches, and how the harness writes and reads them; begin with ``packings``.

``codecs`` serves the usual packings, ``learned_codec`` finds out any other from a backend's own writer.
"""
