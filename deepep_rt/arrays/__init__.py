"""Arrays without a library: views, element types, and conversion from and to array libraries."""
