"""Attention blocks and backends, rotary embeddings and norms for PyTorch."""
