"""Compare providers, modules that offer the metadata utilities such as vLLM, with the reference.

A *subject* is one public name and the questions about it. An *adapter* makes a foreign function accept and return the
reference's objects. A *departure* is a known difference, with its reason. The verdict on a function is whether it is
equal, has known departures, or differs. Begin with ``examine.py``, then ``provider.py``.
"""
