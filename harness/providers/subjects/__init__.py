"""The subjects by theme: the questions for each function of the reference, and how its answer is read.

``SUBJECTS`` contains them all, in the order in which they are reported.
"""

from attncheck.harness.providers.questions import Subject
from attncheck.harness.providers.subjects import (
    contract,
    kernels,
    layers,
    layout,
    order,
    paths,
    ubatches,
    v0_sequences,
    v0_steps,
)

SUBJECTS: tuple[Subject, ...] = (
    *contract.SUBJECTS,
    *ubatches.SUBJECTS,
    *order.SUBJECTS,
    *paths.SUBJECTS,
    *kernels.SUBJECTS,
    *layout.SUBJECTS,
    *layers.SUBJECTS,
    *v0_sequences.SUBJECTS,
    *v0_steps.SUBJECTS,
)
