"""vLLM's metadata utilities, under vLLM's names and with its arguments: one topic in each module.

They make and cut the metadata of a batch, and compute no attention. Begin with ``metadata``, whose class all of them
take. CONTRIBUTING.md lists what else a new one needs.
"""
