"""Learned matching: gradient descent over group elements, on the loss along the path between two models."""
