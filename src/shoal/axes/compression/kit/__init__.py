"""Functions that several compressors share. The compressors are in the folder above."""
