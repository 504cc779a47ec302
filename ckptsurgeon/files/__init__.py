"""What is known about the bytes of one file: torch archives, pickle programs, event files."""
