"""What each rank writes and reads: items, plans, planners and the checks on them."""
