"""The subjects by theme: the questions for each function of the reference, and how its answer is read.

``SUBJECTS`` contains them all, in the order in which they are reported.
"""

from attncheck.harness.providers import subjects_batch, subjects_other, subjects_v0
from attncheck.harness.providers.provider import Subject

SUBJECTS: tuple[Subject, ...] = (
    *subjects_other.CONTRACT,
    *subjects_batch.UBATCHES,
    *subjects_batch.ORDER,
    *subjects_batch.PATHS,
    *subjects_other.KERNELS,
    *subjects_other.LAYOUT,
    *subjects_other.LAYERS,
    *subjects_v0.V0_SEQUENCES,
    *subjects_v0.V0_STEPS,
)
