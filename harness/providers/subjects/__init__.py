"""The subjects, theme by theme: what each function of the reference is asked, and how its answer is read."""
