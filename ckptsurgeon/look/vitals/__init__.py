"""What the tensors of a checkpoint say by themselves: facts, which fail, and observations."""
