"""Horizontal parallelism for plain nn.Modules: replicas, experts, gradient sync, norm and clip."""
