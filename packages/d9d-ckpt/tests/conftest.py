"""Hypothesis without deadlines: two shared cores are no clock."""

from hypothesis import settings

settings.register_profile("d9d-ckpt", deadline=None, max_examples=50)
settings.load_profile("d9d-ckpt")
