"""Readers and writers of files, one per format."""
