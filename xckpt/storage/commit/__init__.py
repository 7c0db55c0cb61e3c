"""How a save becomes visible: staged, published or aborted."""
