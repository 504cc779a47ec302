"""What a checkpoint may keep, and the trees in which its files keep it."""
