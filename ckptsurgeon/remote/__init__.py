"""A run in a bucket, as a mirror on disk in which nothing is read that was not fetched."""
