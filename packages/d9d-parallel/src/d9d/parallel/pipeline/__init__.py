"""Pipeline parallelism: programs as data, a simulator that refuses wrong ones, and an executor."""
