"""Where later versions of DeepEP have their Buffers."""
