"""Pictures of a tensor's shards and chunks: `plane` finds the rectangles, the others draw them."""
