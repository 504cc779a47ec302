"""Input from anyone: the rows of SECURITY.md, through the command line."""
