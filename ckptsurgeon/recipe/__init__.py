"""The recipe as a user writes it: a YAML file, overrides, plain data."""
