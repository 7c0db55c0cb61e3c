"""How values look to people."""
