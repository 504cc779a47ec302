"""The bytes of TensorBoard event files: frames, messages, tags."""
