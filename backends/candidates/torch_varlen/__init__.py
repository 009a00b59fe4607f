"""``torch.nn.attention.varlen`` as a candidate: FlashAttention-2's kernels, as torch brings them along.

Must not know: cases, what is judged.
"""
