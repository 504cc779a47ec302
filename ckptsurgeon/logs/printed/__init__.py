"""What trainers say of themselves: the lines that they print and the points that they log."""
