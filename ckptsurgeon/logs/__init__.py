"""The history that event files tell: which branch each event belongs to, and where to cut."""
