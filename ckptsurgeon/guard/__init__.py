"""What may start a trainer, stop it and operate while nobody looks: `ready` and `watch`."""
