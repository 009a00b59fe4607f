"""The questions: the batch grammar, the case files and the suites.

Reads what people write and hands on frozen :class:`~attncheck.cases.model.Case` objects. Must not know: tensors,
backends, checks as code. Nothing here imports torch.
"""
