"""A closed world of optimizers: what each key of their state and groups is, and how it begins."""
