"""Checkpoints as a graph of named tensors: stream, transform, reshard."""
