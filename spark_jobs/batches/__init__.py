"""Micro-batches: the jobs that plan, write, verify and commit them."""
