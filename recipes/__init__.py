"""The method changed, and the method inside other codebases."""
