"""Mixture of experts for PyTorch: routing, dispatch, grouped GEMM."""
