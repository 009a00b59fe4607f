"""How KV caches pack keys and values, and how the harness writes and reads them; begin with ``packings``.

``codecs`` handles the usual packings, ``learned_codec`` derives any other from the backend's own writer.
"""
