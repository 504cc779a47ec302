"""Whether a saved step goes on from an earlier one, by what both of them hold. Reads only."""
