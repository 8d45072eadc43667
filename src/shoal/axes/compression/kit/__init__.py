"""Helpers that several compressors share; a compressor itself is a file in the folder above."""
