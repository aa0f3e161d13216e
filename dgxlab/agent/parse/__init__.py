"""Readers of what llama.cpp's tools and ninja print: a value exactly as printed, or a sentence that says why not."""
