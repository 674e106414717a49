"""Cross-entropy of a linear layer's output, without the output."""
