"""Reading of bash scripts without running them."""
