"""Logs that are rows of a SQLite database, which others of its runs may share."""
