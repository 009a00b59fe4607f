"""The question: a case made into tensors, laid out as a serving engine would."""
