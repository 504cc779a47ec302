"""MLflow's files: a folder for each run, a file for each metric."""
