"""What the user wants: the recipe, and the file that it is read from."""
