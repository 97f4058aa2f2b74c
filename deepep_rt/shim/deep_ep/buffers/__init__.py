"""The Buffers of later versions of DeepEP, at their import path."""
