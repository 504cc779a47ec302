"""Which rows of the weights belong to which attention head."""
