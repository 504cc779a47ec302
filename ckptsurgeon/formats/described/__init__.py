"""Trainers that a page of YAML describes: which files are a step, and what is where in them."""
