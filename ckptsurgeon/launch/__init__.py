"""Starting the trainer again: its command, its flags, a SLURM script."""
