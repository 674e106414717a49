"""Topology, launch, collectives and test worlds for PyTorch distributed programs."""
