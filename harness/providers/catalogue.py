"""All subjects, in the order they are reported. Must not know: what is asked about them."""

from attncheck.harness.providers.questions import Subject
from attncheck.harness.providers.subjects import contract, kernels, layers, layout, order, paths, ubatches

SUBJECTS: tuple[Subject, ...] = (
    *contract.SUBJECTS,
    *ubatches.SUBJECTS,
    *order.SUBJECTS,
    *paths.SUBJECTS,
    *kernels.SUBJECTS,
    *layout.SUBJECTS,
    *layers.SUBJECTS,
)
