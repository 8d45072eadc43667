"""Functions that several compressors share; the compressors are in the folder above."""
