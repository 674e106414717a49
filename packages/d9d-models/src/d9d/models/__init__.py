"""White-box model catalogue, losses and Hugging Face maps for d9d."""
