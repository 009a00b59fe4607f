"""Examining providers: modules that offer the metadata utilities, such as vLLM, held against the reference.

A *subject* is one public name and the questions about it; an *adapter* makes a foreign function look like the
reference's; a *departure* is a known difference, with its reason. The verdict on a function says which it is.
Begin with ``plan.py``, then ``examination.py``.
"""
