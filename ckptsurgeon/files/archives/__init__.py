"""The zip archives of torch.save: their directory, their records, and edits of them."""
