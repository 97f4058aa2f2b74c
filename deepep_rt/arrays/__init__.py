"""Arrays without a library: views, element types, and the frameworks that they come from."""
