"""Pictures and tables on the terminal: shard layouts, reshard plans, mappings, listings."""
