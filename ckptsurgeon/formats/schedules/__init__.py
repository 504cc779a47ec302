"""What each family of schedulers saves, and the rate that it makes of it."""
