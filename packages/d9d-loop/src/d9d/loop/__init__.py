"""A trainer that is just a composition: data order, optimizers, logs, kill and resume."""
