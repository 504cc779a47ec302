"""What many tests share: how to launch, make, read and compare runs."""
