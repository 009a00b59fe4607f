"""vLLM's metadata utilities, under vLLM's names and with its arguments: one topic per module.

They build and split the metadata of a batch, and compute no attention. Begin with ``metadata``, whose class all of them
take. CONTRIBUTING.md lists the steps to add another.
"""
