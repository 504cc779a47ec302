"""How two saved steps, two runs, or a run before and after a surgery differ. Reads only."""
